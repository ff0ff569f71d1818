"""Searching with shared sequences: proven like the rest, offered where it may pay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from claw_plan.planner.candidate import CP_COMM_TYPES, Candidate
from claw_plan.planner.errors import PlanError
from claw_plan.planner.graph import PLAIN, Amount, Exchange, ModelGraph
from claw_plan.planner.plan import save_plan
from claw_plan.planner.planned import open_planned
from claw_plan.planner.planning import PlanningRequest, make_plan
from claw_plan.planner.score import Scorer
from claw_plan.planner.search_space import search_space
from claw_plan.planner.space import Space

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"


def shared(graph: ModelGraph, cp: int) -> ModelGraph:
    """The toy as one of cp ranks, which gather in every block."""
    exchange = Exchange(op="all_gather", bytes=Amount(0, 300), module="", axis="cp")
    ends, block, last = graph.costs[PLAIN][0], graph.costs[PLAIN][1], graph.costs[PLAIN][2]
    block = replace(
        block, forward=(exchange, *block.forward), backward=(*block.backward, exchange)
    )
    return replace(
        graph, cp=cp, costs={PLAIN: (ends, block, last)}, tensor_parallel=(), tp_divides=1,
        no_tensor_parallel="shared",
    )  # fmt: skip


def toy_problem(toys: Any, cp: int, **settings: Any) -> Any:
    cluster = toys.cluster(nodes=2, devices=4, kind=settings.pop("kind", "cuda"))
    graph = shared(toys.graph(layers=3, width=64), cp)
    return toys.problem(graph, cluster, global_batch=12, **settings)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("cp", [2, 3, 4])
def test_the_search_equals_brute_force_and_no_bound_exceeds_its_step(
    toys: Any, cp: int, precision: str
) -> None:
    scorer = Scorer(toy_problem(toys, cp, precision=precision))
    space = Space(scorer.problem, {})
    times, bounds = {}, scorer.bounds
    for group in space.groups():
        for candidate in space.members(group):
            assert candidate.cp == cp and candidate.num_devices <= 8
            path = bounds.stage_path(candidate)
            times[candidate] = step_ns = scorer.step_time_ns(candidate, path.cuts)
            assert bounds.streams_ns(candidate, path) <= step_ns, candidate
            assert bounds.candidate_ns(candidate, path) <= step_ns, candidate
            assert bounds.work_ns(group.base, path) <= step_ns, candidate
    assert len(times) == int(space.table.size.sum()) > 20
    found = search_space(scorer, space)
    assert found.report.optimal
    assert found.times_ns[found.ranked[0][0]] == min(times.values())


def test_states_are_cut_over_the_ranks_that_share_sequences(toys: Any) -> None:
    """Two ranks of cp hold what two of dp_shard hold."""
    alone = Scorer(toys.problem(toys.graph(), toys.cluster(), global_batch=8))
    scorer = Scorer(toys.problem(shared(toys.graph(), 2), toys.cluster(), global_batch=8))
    cuts = ((0, 6),)
    of_dp = alone.memory.rank(Candidate(dp_shard=2), 0, cuts).parts
    of_cp = scorer.memory.rank(Candidate(cp=2), 0, cuts).parts
    names = ("parameters", "optimizer", "gathered")
    assert [of_cp[name] for name in names] == [of_dp[name] for name in names]


def request(tmp_path: Path, **settings: Any) -> PlanningRequest:
    length, width = settings.pop("length", 64), settings.pop("width", 256)
    build = (
        f"GPT(GPTConfig(vocab_size=64, block_size={length}, n_layer=2, n_head=8, n_embd={width}))"
    )
    return PlanningRequest(
        model=GPT,
        build=build,
        inputs=f"idx=int64[B,{length}]<64 targets=int64[B,{length}]<64",
        cluster=settings.pop("cluster", "1xdgx-a100-40gb"),
        output_folder=tmp_path,
        **settings,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", CP_COMM_TYPES)
def test_pinned_it_is_planned_written_and_scored_again(tmp_path: Path, kind: str) -> None:
    fix = {"cp": 2, "cp_comm_type": kind}
    result = make_plan(request(tmp_path, global_batch=8, fix=fix))
    assert (result.best.candidate.cp, result.best.candidate.cp_comm_type) == (2, kind)
    assert result.plan.mesh.axes["cp"] == 2
    save_plan(result.plan, tmp_path / "plan.yaml")
    again = open_planned(tmp_path / "plan.yaml").scored
    assert again.step_time_ns == result.best.step_time_ns
    # Model flops are those of whole sequences, whatever a rank computes of them.
    alone = make_plan(request(tmp_path, global_batch=8, fix={"cp": 1, "pp": 1, "tp": 1})).best
    work = [s.mfu * s.step_time_ns * s.candidate.num_devices for s in (alone, result.best)]
    assert work[0] == pytest.approx(work[1], rel=1e-6)


@pytest.mark.slow
def test_a_pinned_degree_that_the_model_has_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"--fix cp=8: .*a sequence of 24 does not divide into 2"):
        make_plan(request(tmp_path, length=24, global_batch=8, fix={"cp": 8}))
    with pytest.raises(PlanError, match=r"cp x tp: no test proves"):
        make_plan(request(tmp_path, global_batch=8, fix={"cp": 2, "tp": 2}))


@pytest.mark.slow
def test_it_is_offered_where_the_batch_has_too_few_samples(tmp_path: Path) -> None:
    """One long sample on eight GPUs: without cp seven have nothing to do."""
    result = make_plan(
        request(tmp_path, length=16384, width=1024, global_batch=1, fix={"tp": 1, "pp": 1})
    )
    assert result.best.candidate.cp > 1
    short = make_plan(request(tmp_path, length=64, global_batch=8, fix={"tp": 1, "pp": 1}))
    assert short.best.candidate.cp == 1
