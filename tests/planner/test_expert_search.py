"""How many ranks share experts: the search with ep pinned, and near the best plan without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from claw_plan.planner.errors import PlanError
from claw_plan.planner.expert_search import pinned_experts, search_experts
from claw_plan.planner.graph import ExpertRule, ModelGraph, Op, Parameter
from claw_plan.planner.problem import Problem
from claw_plan.planner.score import Scorer
from claw_plan.planner.search_space import Searched, search_space
from claw_plan.planner.space import Space

EXPERTS = 4


def mixture(toys: Any, *, row_bytes: int = 4, weights: int = 64) -> ModelGraph:
    """The toy chain with 4 experts in each block, which are all of its last operator's work."""
    graph = toys.graph(layers=3, tied=False)
    rule = ExpertRule(
        module="moe", experts=EXPERTS, rows_per_sample=4, row_bytes=row_bytes, structures=(1,)
    )

    def marked(items: tuple[Any, ...]) -> tuple[Any, ...]:
        first = next(i for i, item in enumerate(items) if isinstance(item, Op))
        return tuple(
            replace(item, module="blocks.0.moe") if i == first else item
            for i, item in enumerate(items)
        )

    costs = {}
    for name, (start, block, end) in graph.costs.items():
        block = replace(block, forward=marked(block.forward), backward=marked(block.backward))
        costs[name] = (start, block, end)
    own = tuple(
        Parameter(
            names=(f"blocks.{i}.moe.weight",), shape=(EXPERTS, weights, 8), dtype="float32",
            trainable=True, units=(i + 1,),
        )
        for i in range(3)
    )  # fmt: skip
    return replace(
        graph, parameters=(*graph.parameters, *own), expert_parallel=(rule,), costs=costs
    )


def problem_of(toys: Any, precision: str, kind: str, **sizes: int) -> Problem:
    cluster = toys.cluster(nodes=2, devices=2, kind=kind)
    problem: Problem = toys.problem(mixture(toys, **sizes), cluster, precision=precision)
    return problem


FEWER = {"offload": "none", "microbatch_size": 1}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("ep", [2, 4])
def test_the_best_is_that_of_brute_force(toys: Any, precision: str, kind: str, ep: int) -> None:
    problem = problem_of(toys, precision, kind).for_ep(ep)
    scorer = Scorer(problem)
    space = Space(problem, {**FEWER, "ep": ep})
    found = search_space(scorer, space)
    times = {}
    for group in space.groups():
        for candidate in space.members(group):
            path = scorer.bounds.stage_path(candidate)
            assert path is not None
            times[candidate] = scorer.step_time_ns(candidate, path.cuts)
            assert scorer.bounds.candidate_ns(candidate, path) <= times[candidate]
    assert times
    assert all(c.ep == ep and c.etp == c.tp and c.dp % ep == 0 for c in times)
    assert found.times_ns[found.ranked[0][0]] == min(times.values())
    assert found.report.optimal


def searched(problem: Problem, fix: dict[str, Any]) -> tuple[Scorer, Searched]:
    scorer = Scorer(problem)
    return search_experts(scorer, search_space(scorer, Space(problem, fix)), fix)


def test_experts_are_shared_where_their_gradients_are_dear(toys: Any) -> None:
    problem = problem_of(toys, "float32", "cuda", row_bytes=4, weights=4096)
    fix = {**FEWER, "pp": 1, "tp": 1}
    scorer, found = searched(problem, fix)
    assert found.ranked[0][0].ep > 1
    assert scorer.problem.graph.ep == found.ranked[0][0].ep


def test_they_stay_whole_where_their_tokens_are(toys: Any) -> None:
    problem = problem_of(toys, "float32", "cuda", row_bytes=1 << 20, weights=1)
    scorer, found = searched(problem, {**FEWER, "pp": 1, "tp": 1})
    assert found.ranked[0][0].ep == 1
    assert scorer.problem is problem


def test_a_pinned_number_is_kept(toys: Any) -> None:
    problem = problem_of(toys, "float32", "cuda")
    assert pinned_experts(problem, {}) is problem
    assert pinned_experts(problem, {"ep": 2}).graph.ep == 2
    with pytest.raises(PlanError, match="--fix ep=3: a layer has 4 experts"):
        pinned_experts(problem, {"ep": 3})


def test_degrees_that_pinned_knobs_forbid_are_told_with_why(toys: Any) -> None:
    problem = problem_of(toys, "float32", "cuda")
    _, found = searched(problem, {**FEWER, "dp_shard": 1, "dp_replicate": 1})
    stays, refused = found.said
    assert stays == "experts stay whole on every rank (none offered)"
    assert refused.startswith("ep=2, 4 not offered: ")
