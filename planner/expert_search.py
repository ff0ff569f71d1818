"""How many ranks share experts: searched where ep is pinned, else near the best plan without.

Multiplied into the table of the whole space ep would make it as many times as large. So the
space is searched with whole experts first; then every ep, at the pp and tp of the best plan, or
wherever nothing fits at all everywhere. What is best there is proven for these pp and tp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from claw_plan.planner.errors import PlanError
from claw_plan.planner.members import divisors
from claw_plan.planner.objective import Objective
from claw_plan.planner.problem import Problem
from claw_plan.planner.score import Scorer
from claw_plan.planner.search_space import Searched, search_space
from claw_plan.planner.space import Space
from claw_plan.planner.supported import shares_experts


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
    near = {"pp": best[0].pp, "tp": best[0].tp} if best else {}
    limit = found.times_ns[best[0]] if best and objective is None else None
    for ep in _degrees(problem, near):
        other = Scorer(problem.for_ep(ep))
        space = Space(other.problem, {**fix, **near, "ep": ep}, codecs)
        shared = search_space(other, space, limit_ns=limit, objective=objective)
        if not shared.ranked:
            continue
        time_ns = shared.times_ns[shared.ranked[0][0]]
        if best is None or _is_better(shared, found, objective):
            scorer, found, best = other, shared, shared.ranked[0]
            limit = time_ns if objective is None else None
    return scorer, found


def _degrees(problem: Problem, near: Mapping[str, int]) -> list[int]:
    """Those that divide the experts and some number of ranks that see different tokens."""
    most = problem.cluster.num_devices // (near.get("pp", 1) * near.get("tp", 1))
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
