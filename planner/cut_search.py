"""Searches the cuts of stages that the proof over the space leaves open, and bounds the rest.

`search_space` proves the best with stages cut as evenly as they can be. Another may be faster: an
early stage that is light lets the next begin sooner, and another cut may fit in memory. Groups
whose least path over all cuts is below the best are listed with every cut that may beat it, and
opened best bound first. Of groups with too many such cuts the bound is told, and around the best
plans boundaries are moved by one while that helps.

How far it goes is counted in bounds and simulations, never in seconds: the same on every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from sys import maxsize
from typing import Any

import numpy as np

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.group_bounds import GroupBounds
from claw_plan.planner.group_opener import (
    PLAYED,
    PLAYED_WITH_TRAFFIC,
    SIMULATED,
    Choice,
    GroupOpener,
    order_of,
)
from claw_plan.planner.group_table import SOME
from claw_plan.planner.objective import Objective, StepTime
from claw_plan.planner.objective_search import Valued
from claw_plan.planner.score import Scorer
from claw_plan.planner.search import Branch, CutReport, best_first
from claw_plan.planner.search_space import Searched, search_closer
from claw_plan.planner.side_by_side import side_by_side
from claw_plan.planner.stage_path import Cuts

MOST_CUTS = 2_000
"""Cuts that are listed of one group."""

STEPS = 100
"""To list the cuts of a group as many stages are placed as this part of the budget."""

STEPS_PER_MICROSECOND = 3
"""Placed by compiled code, as measured for 6 and 96 blocks."""

BUDGET = 300_000
"""Microseconds of a core, by what was done, in a space whose groups are too many for the finer
knobs; ten times that in others, whose steps are simulated in a millisecond or two."""

NEVER_NS = 1 << 60
"""No step takes so long."""

PATH = 200
"""Microseconds that the times of a cut's stages took to make."""

SEEDS = 4
"""Plans around which boundaries are moved."""


@dataclass(frozen=True, kw_only=True)
class OtherCuts:
    """What other cuts brought: times and choices, the best last; `best` was the best value."""

    better: Sequence[tuple[int, Choice]]
    report: CutReport
    best: int


def search_beyond(
    scorer: Scorer, found: Searched, fix: Mapping[str, Any], objective: Objective | None = None
) -> Searched:
    """What the space left out: finer knobs near the best, and other cuts of all of it.

    Each takes half a second where the space is large, and then they run beside each other.
    """
    closer = partial(search_closer, scorer, found, fix, objective)
    if found.space.is_refined:
        return search_cuts(scorer, closer(), objective)
    works: list[Callable[[], Any]] = [closer, partial(other_cuts, scorer, found, objective)]
    found, other = side_by_side(works)
    return with_cuts(found, other, objective)


def search_cuts(scorer: Scorer, found: Searched, objective: Objective | None = None) -> Searched:
    """The same with other cuts. A candidate stands for its best cut among those simulated."""
    return with_cuts(found, other_cuts(scorer, found, objective), objective)


def other_cuts(
    scorer: Scorer, found: Searched, objective: Objective | None = None
) -> OtherCuts | None:
    """Looks for cuts better than what was found; None where that was not proven itself.

    Where nothing fits, another cut may; it is looked for where there are not too many groups.
    """
    if not found.report.optimal or not (found.ranked or found.space.is_refined):
        return None
    search = _CutSearch(scorer, found, objective or StepTime())
    search.list_groups()
    better = search.run()
    return OtherCuts(better=better, report=search.report(len(better)), best=search.best)


def with_cuts(
    found: Searched, other: OtherCuts | None, objective: Objective | None = None
) -> Searched:
    """What was found, which may be better than when other cuts were looked for, with those."""
    if other is None:
        return found
    times_ns, ranked = dict(found.times_ns), list(found.ranked)
    for time_ns, choice in other.better:
        if time_ns < times_ns.get(choice[0], maxsize):
            ranked = [choice, *(known for known in ranked if known[0] != choice[0])]
            times_ns[choice[0]] = time_ns
    values = {
        choice: (objective or StepTime()).value(*choice, times_ns[choice[0]]) for choice in ranked
    }
    ranked.sort(key=values.__getitem__)
    cuts = other.report
    if ranked:
        least = other.best * (1 - cuts.gap)
        cuts = replace(cuts, gap=max(0.0, 1 - least / values[ranked[0]]))
    return replace(
        found,
        ranked=tuple(ranked),
        times_ns=times_ns,
        report=replace(found.report, cuts=cuts),
    )


@dataclass
class _CutSearch:
    """The groups of a search that may have a better cut."""

    scorer: Scorer
    found: Searched
    objective: Objective
    groups: int = 0
    cuts: int = 0
    left: int = 0
    gap: float = 0.0
    best: int = NEVER_NS
    _spent: int = 0
    _branches: list[Branch[Choice]] = field(default_factory=list)
    _left_values: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.known = [
            (self.value(choice, self.found.times_ns[choice[0]]), choice)
            for choice in self.found.ranked[:1]
        ]
        self.opener = GroupOpener(self.scorer, self.found.space, recuts=False)
        self.budget = BUDGET * (10 if self.found.space.is_refined else 1)

    @property
    def bounds(self) -> GroupBounds:
        """Of the space's groups."""
        return self.found.bounds

    def value(self, choice: Choice, time_ns: int) -> int:
        """Of a candidate whose step lasts so long."""
        candidate, cuts = choice
        return self.objective.value(candidate, cuts, time_ns)

    def list_groups(self) -> None:
        """Finds the groups, and of each that has not too many the cuts that may be better.

        Those with one stage a rank and the fewest stages first: they have the fewest such cuts.
        """
        space, overhead = self.found.space, self.scorer.problem.step_overhead_ns()
        table, even_ns = space.table, self.bounds.even_ns
        limits = {n: self._latest_ns(n) - overhead for n in np.unique(table.num_devices).tolist()}
        highest = max(limits.values())
        rows = [
            row
            for row in np.flatnonzero((table.pp > 1) & (even_ns < highest)).tolist()
            if even_ns[row] < limits[int(table.num_devices[row])]
        ]
        pairs = np.array([(row, again) for row in rows for again in self._blocks(row)], np.int64)
        chosen, blocks = pairs.reshape(-1, 2).T
        limit_ns = np.array([limits[n] for n in table.num_devices[chosen].tolist()], np.int64)
        least_ns = self.bounds.any_cut(chosen, blocks, limit_ns)
        several = table.stages_per_rank[chosen] > 1
        for place in np.lexsort((least_ns, table.pp[chosen], several)).tolist():
            if least_ns[place] < limit_ns[place]:
                self.groups += 1
                self._list_cuts(
                    int(chosen[place]),
                    int(blocks[place]),
                    int(limit_ns[place]),
                    int(least_ns[place]) + overhead,
                )

    def _blocks(self, row: int) -> Sequence[int]:
        """How many blocks of each stage may run again in the groups of a row."""
        again = int(self.found.space.table.recompute_blocks[row])
        return self.found.space.blocks_run_again(row) if again == SOME else (again,)

    def _list_cuts(self, row: int, again: int, limit_ns: int, least_ns: int) -> None:
        """Makes a branch of each cut of a group, or leaves the group."""
        group = self.found.space.group(row, again)
        devices, cuts = group.base.num_devices, None
        if self._spent < self.budget // 5:
            most_steps = self.budget // STEPS
            cuts, steps = self.bounds.cuts_below(row, again, limit_ns, MOST_CUTS, most_steps)
            self._spent += steps // STEPS_PER_MICROSECOND
        if cuts is None:
            self._left_values.append(self.objective.bound(least_ns, devices))
            return
        even = self.scorer.bounds.stage_path(group.base)
        overhead = self.scorer.problem.step_overhead_ns()
        for path_ns, cut in cuts:
            if even is not None and cut != even.cuts:
                self.cuts += 1
                opens = partial(self._open, row, again, cut)
                order = (*order_of(group.base), cut)
                self._branches.append(Branch(path_ns + overhead, order, group.size, opens))

    def _open(self, row: int, again: int, cut: Cuts) -> Iterator[Branch[Choice]]:
        group = self.found.space.group(row, again)
        return self.opener.add_up(group, self.scorer.bounds.path_of(group.base, cut))

    def _latest_ns(self, devices: int) -> int:
        """The least time on so many devices that is no better than the best value."""
        if not self.known:
            return NEVER_NS
        value, choice = self.known[0]
        low, high = 0, self.found.times_ns[choice[0]]
        while self.objective.bound(high, devices) < value and high < NEVER_NS:
            low, high = high, 2 * high
        while low < high:
            middle = (low + high) // 2
            if self.objective.bound(middle, devices) < value:
                low = middle + 1
            else:
                high = middle
        return high

    def run(self) -> list[tuple[int, Choice]]:
        """The time and choice of what was simulated, the best last."""
        valued = Valued(self.objective, ())
        moved = list(self._moved()) if self._left_values else []
        known = [(valued.value(choice, time_ns), choice) for time_ns, choice in moved]
        known += self.known
        outcome = best_first(
            [valued.branch(branch) for branch in self._branches],
            known=known,
            is_spent=lambda: self._spent + self.opener.spent >= self.budget,
        )
        self.best = outcome.ranked[0][0] if outcome.ranked else NEVER_NS
        open_values = [value for value in self._left_values if value < self.best]
        self.gap = max([outcome.gap, *(1 - value / self.best for value in open_values)])
        self.left = len(open_values) + bool(outcome.left)
        times = valued.times_ns
        return [
            (times[choice], choice) for _, choice in reversed(outcome.ranked) if choice in times
        ]

    def _moved(self) -> Iterator[tuple[int, Choice]]:
        """Around the plans that came closest, boundaries moved while that helps."""
        near = [*self.found.ranked[:1], *(choice for _, choice in self.found.looked_at)]
        seeds: dict[tuple[object, ...], Choice] = {}
        for candidate, cuts in near:
            if candidate.pp > 1:
                seeds.setdefault(order_of(candidate)[1:5], (candidate, cuts))
        for choice in list(seeds.values())[:SEEDS]:
            other = self._descend(choice)
            if other is not None:
                self._spent += SIMULATED * self._passes(choice)
                yield self.scorer.step_time_ns(choice[0], other), (choice[0], other)

    def _passes(self, choice: Choice) -> int:
        batch = self.scorer.problem.training.global_batch
        return len(choice[1]) * choice[0].num_microbatches(batch)

    def _descend(self, choice: Choice) -> Cuts | None:
        """The cut from which no move by one is better, if it may beat the best; by bounds."""
        candidate, cuts = choice
        least = self._latest_ns(candidate.num_devices)
        found: Cuts | None = None
        improved = True
        while improved:
            improved = False
            for other in _neighbours(cuts, self.scorer.problem.graph.edges):
                if self._spent > self.budget * 4 // 5:
                    return found
                bound = self._bound_ns(candidate, other, least)
                if bound < least and self.scorer.memory.fits(candidate, other):
                    least, found, improved = bound, other, True
            cuts = cuts if found is None else found
        return found

    def _bound_ns(self, candidate: Candidate, cuts: Cuts, limit_ns: int) -> int:
        """A bound of the candidate cut so, no closer than what shows that it misses the limit."""
        bounds, passes = self.scorer.bounds, self._passes((candidate, cuts))
        self._spent += PATH
        path = bounds.path_of(candidate, cuts)
        bound = path.longest_ns(passes // len(cuts))
        if bound < limit_ns:
            self._spent += PLAYED * passes
            bound = bounds.schedule_ns(candidate, path)
        if bound < limit_ns:
            self._spent += PLAYED_WITH_TRAFFIC * passes
            bound = bounds.candidate_ns(candidate, path)
        return bound

    def report(self, simulated: int) -> CutReport:
        """What was looked at."""
        return CutReport(
            groups=self.groups,
            cuts=self.cuts,
            simulated=simulated,
            groups_left=self.left,
            gap=self.gap,
        )


def _neighbours(cuts: Cuts, edges: Sequence[int]) -> Iterator[Cuts]:
    """Every cut with one boundary moved to the next legal place."""
    places = {edge: place for place, edge in enumerate(edges)}
    starts = [places[start] for start, _ in cuts] + [len(edges) - 1]
    for stage in range(1, len(cuts)):
        for step in (-1, 1):
            moved = [*starts]
            moved[stage] += step
            if moved[stage - 1] < moved[stage] < moved[stage + 1]:
                yield tuple(pairwise(edges[place] for place in moved))
