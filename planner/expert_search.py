"""How many ranks share experts: searched where ep is pinned, else near the best plan without.

Multiplied into the table of the whole space ep would make it as many times as large. So the
space is searched with whole experts first; then with every ep. On a large cluster that is done at
the pp of the best plan only, if there is one, and what is best there is proven for that pp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from claw_plan.planner.errors import PlanError
from claw_plan.planner.members import divisors
from claw_plan.planner.objective import Objective
from claw_plan.planner.problem import Problem
from claw_plan.planner.score import Scorer
from claw_plan.planner.search_space import Searched, search_space
from claw_plan.planner.space import Space
from claw_plan.planner.supported import shares_experts
from claw_plan.profiles.units import format_ns

MOST_DEVICES = 256
"""Of a cluster on which every ep is searched at every pp: some seconds for each."""


def pinned_experts(problem: Problem, fix: Mapping[str, Any]) -> Problem:
    """The problem with as many ranks sharing experts as are pinned; raises PlanError."""
    try:
        return problem.for_ep(fix.get("ep", 1))
    except PlanError as error:
        raise PlanError(f"--fix {error}") from None


def search_experts(
    scorer: Scorer,
    found: Searched,
    fix: Mapping[str, Any],
    objective: Objective | None = None,
    codecs: Sequence[str] = (),
) -> tuple[Scorer, Searched]:
    """The best with shared experts and its scorer, where it is better than what was found."""
    problem = scorer.problem
    if "ep" in fix or problem.graph.ep_divides == 1 or problem.graph.no_expert_parallel:
        return scorer, found
    best = found.ranked[0] if found.ranked else None
    is_large = problem.cluster.num_devices > MOST_DEVICES
    near = {"pp": best[0].pp} if best and is_large else {}
    whole_ns, tried, passed_over = limit_of(found), list[int](), dict[int, str]()
    said = found.said
    limit = limit_of(found) if objective is None else None
    for ep in _degrees(problem, near):
        other = Scorer(problem.for_ep(ep))
        try:
            space = Space(other.problem, {**fix, **near, "ep": ep}, codecs)
            if not len(space.table):
                raise PlanError(space.explain_empty())
        except PlanError as error:  # what is pinned is not proven together with ep
            passed_over[ep] = str(error)
            continue
        tried.append(ep)
        shared = search_space(other, space, limit_ns=limit, objective=objective)
        if not shared.ranked:
            continue
        time_ns = shared.times_ns[shared.ranked[0][0]]
        if best is None or _is_better(shared, found, objective):
            scorer, found, best = other, shared, shared.ranked[0]
            limit = time_ns if objective is None else None
    where = f"pp={near['pp']}" if near else "every pp"
    return scorer, replace(
        found,
        said=(*said, _said(found, tried, whole_ns, where), *_not_offered(passed_over)),
    )


def limit_of(found: Searched) -> int | None:
    """The time of its best, None where nothing fits."""
    return found.times_ns[found.ranked[0][0]] if found.ranked else None


def _said(found: Searched, tried: Sequence[int], whole_ns: int | None, where: str) -> str:
    """What sharing experts brings, for the report."""
    searched = f"ep={', '.join(map(str, tried))} searched at {where}" if tried else "none offered"
    whole = "no plan fits" if whole_ns is None else f"{format_ns(whole_ns)} a step"
    ep = found.ranked[0][0].ep if found.ranked else 1
    if ep == 1:
        return f"experts stay whole on every rank ({searched})"
    time_ns = limit_of(found)
    assert time_ns is not None
    return (
        f"{ep} ranks share the experts of a layer: {format_ns(time_ns)} a step, with whole "
        f"experts {whole} ({searched})"
    )


def _not_offered(passed_over: Mapping[int, str]) -> Iterator[str]:
    """Which degrees were passed over, and why the least of them was."""
    if passed_over:
        degrees, why = ", ".join(map(str, passed_over)), next(iter(passed_over.values()))
        yield f"ep={degrees} not offered: {why.removeprefix('--fix ')}"


def _degrees(problem: Problem, near: Mapping[str, int]) -> list[int]:
    """Those that divide the experts and some number of ranks that see different tokens."""
    most = problem.cluster.num_devices // near.get("pp", 1)
    dps = [dp for dp in divisors(problem.training.global_batch) if dp <= most]
    return [
        ep
        for ep in divisors(problem.graph.ep_divides)
        if ep > 1 and any(shares_experts(dp, dp, ep) for dp in dps)
    ]


def _is_better(one: Searched, other: Searched, objective: Objective | None) -> bool:
    (first, second) = ((s.ranked[0], s.times_ns[s.ranked[0][0]]) for s in (one, other))
    if objective is None:
        return first[1] < second[1]
    return objective.value(*first[0], first[1]) < objective.value(*second[0], second[1])
