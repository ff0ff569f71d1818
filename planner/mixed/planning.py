"""Planning on several kinds of devices: the fastest of all that is known for them.

Compared are the best plan in which the slowest device counts for all (`search_space` on the whole
cluster), the best on each kind alone, kinds that share the batch (`shares`) and pipelines
over kinds (`search`). One simulator judges all, so the answer is never slower than any of
the first two, which run today.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from claw_plan.planner.explain import infeasible_message
from claw_plan.planner.mixed.kinds import Kind, MakeCost, MixedProblem, kinds_of
from claw_plan.planner.mixed.score import MixedScored, MixedScorer
from claw_plan.planner.mixed.search import MixedSearched, search_mixed
from claw_plan.planner.mixed.shares import Shared, Shares
from claw_plan.planner.mixed.space import MixedSpace
from claw_plan.planner.problem import Problem
from claw_plan.planner.score import Scored, Scorer
from claw_plan.planner.search import SearchReport
from claw_plan.planner.search_space import search_space
from claw_plan.planner.shards import ShardSizes
from claw_plan.planner.space import Space


@dataclass(frozen=True, kw_only=True)
class Alone:
    """The best of each kind on its own devices, or why there is none, and what was learnt."""

    shares: Shares
    found: Mapping[int, Scored | str]

    @property
    def fastest(self) -> tuple[Kind, Scored] | None:
        """The kind that is fastest alone, and its plan."""
        scored = {k: found for k, found in self.found.items() if not isinstance(found, str)}
        if not scored:
            return None
        kind = min(scored, key=lambda k: (scored[k].step_time_ns, k))
        return self.shares.scorer.problem.kinds[kind], scored[kind]


@dataclass(frozen=True, kw_only=True)
class MixedAnswer:
    """What is known of a cluster of several kinds.

    `mixed` is the fastest that uses several kinds unlike, None where none fits or may be faster
    than what is known. `bound_ns` is below every step of the two families over unlike devices.
    """

    problem: MixedProblem
    alone: Alone
    mixed: MixedScored | None
    bound_ns: int | None
    shared: Shared
    searched: MixedSearched


def plan_alone(problem: Problem, make_cost: MakeCost) -> Alone:
    """Every kind by itself, with the whole batch."""
    mixed = MixedProblem(whole=problem, kinds=kinds_of(problem, make_cost))
    shares = Shares(MixedScorer(mixed, ShardSizes(problem.graph)))
    return Alone(shares=shares, found={k: _alone(shares, k) for k in range(len(mixed.kinds))})


def plan_mixed(
    alone: Alone, *, known_ns: int | None, time_limit_s: float | None = None
) -> MixedAnswer:
    """Everything that several kinds offer; `known_ns` is the best in which the slowest counts."""
    shares, scorer = alone.shares, alone.shares.scorer
    times = [alone.fastest[1].step_time_ns] if alone.fastest is not None else []
    times += [known_ns] if known_ns is not None else []
    shared = shares.search(limit_ns=min(times, default=None), time_limit_s=time_limit_s)
    times += [ns for ns, _ in shared.ranked]
    searched = search_mixed(
        MixedSpace(scorer), limit_ns=min(times, default=None), time_limit_s=time_limit_s
    )
    ranked = sorted([*shared.ranked, *searched.ranked], key=lambda entry: entry[0])
    bounds = (shared.bound_ns, searched.bound_ns)
    return MixedAnswer(
        problem=scorer.problem,
        alone=alone,
        mixed=scorer.score(ranked[0][1]) if ranked else None,
        bound_ns=min((ns for ns in bounds if ns is not None), default=None),
        shared=shared,
        searched=searched,
    )


def _alone(shares: Shares, kind: int) -> Scored | str:
    """The best plan on one kind's devices for the whole batch."""
    own = shares.scorer.problem.kinds[kind]
    best = shares.alone(kind, shares.batch)
    scorer = Scorer(own.problem)
    if best is not None:
        return scorer.score(*best[1])
    found = search_space(scorer, Space(own.problem, {}))
    return infeasible_message(scorer, found) if found.report.space else "no way divides the batch"


def report_of(answer: MixedAnswer, report: SearchReport, best_ns: int) -> SearchReport:
    """The search of the whole cluster with what unlike plans add to it, and the gap of both."""
    shared, searched = answer.shared, answer.searched
    space = shared.space + searched.space
    simulated = len(shared.ranked) + len(searched.ranked)
    bound_ns = best_ns if answer.bound_ns is None else min(answer.bound_ns, best_ns)
    return replace(
        report,
        space=report.space + space,
        bound_pruned=report.bound_pruned + space - simulated - searched.memory_pruned,
        memory_pruned=report.memory_pruned + searched.memory_pruned,
        simulated=report.simulated + simulated,
        seconds=report.seconds + shared.seconds + searched.seconds,
        gap=max(report.gap, (best_ns - bound_ns) / best_ns),
    )
