"""Searches a `Space` with a `Scorer`: bounds whole groups, opens the promising, proves the rest.

Groups lie in a table in the order of their crudest bounds, cut into runs. A run that may hold the
best is opened into its groups, with the bounds of their cuts; what no member of a group can hold
in memory is pruned with the group. A candidate whose best stage cut does not fit in memory gets a
second chance with the best cut that does; only when there is none is it pruned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.group_bounds import RUN, GroupBounds
from claw_plan.planner.group_opener import Choice as Choice
from claw_plan.planner.group_opener import GroupOpener, order_of
from claw_plan.planner.group_table import Int
from claw_plan.planner.objective import Objective
from claw_plan.planner.objective_search import Valued
from claw_plan.planner.score import Scorer
from claw_plan.planner.search import Branch, Evaluated, Outcome, SearchReport, best_first
from claw_plan.planner.side_by_side import one_by_one, side_by_side
from claw_plan.planner.space import Space

Opens: TypeAlias = Callable[[], Iterable[Branch[Choice]] | Evaluated[Choice]]


@dataclass(frozen=True, kw_only=True)
class Searched:
    """The candidates that were simulated, best first, with their cuts; and what was not.

    `looked_at` holds those that fit and were only played on idle links, closest first,
    `pruned` holds the candidates that memory ruled out with their cuts, `pruned_rows` the groups
    that it ruled out whole, `times_ns` the simulated times by candidate. `closer` counts what
    `search_closer` looked at beyond the space, `said` is what to tell of other searches beside it.
    """

    ranked: tuple[Choice, ...]
    times_ns: dict[Candidate, int]
    report: SearchReport
    space: Space = field(repr=False)
    bounds: GroupBounds = field(repr=False)
    looked_at: list[tuple[int, Choice]] = field(repr=False)
    pruned: list[Choice] = field(repr=False)
    pruned_rows: list[int] = field(repr=False)
    closer: SearchReport | None = None
    said: tuple[str, ...] = ()


class _Searcher:
    """Makes the branches; keeps what explanations need."""

    def __init__(self, scorer: Scorer, space: Space) -> None:
        self._scorer, self._space = scorer, space
        self.bounds = GroupBounds(scorer, space)
        self.opener = GroupOpener(scorer, space, recuts=True)
        self.pruned_rows: list[int] = []

    def branches(self) -> Iterator[Branch[Choice]]:
        """Runs of groups in the order of their crudest bounds."""
        even_ns, sizes = self.bounds.even_ns, self._space.table.size
        order = np.argsort(even_ns, kind="stable")
        for start in range(0, len(order), RUN):
            rows = order[start : start + RUN]
            size = int(sizes[rows].sum())
            yield Branch(int(even_ns[rows[0]]), (), size, partial(self._groups, rows))

    def _groups(self, rows: Int) -> Iterator[Branch[Choice]]:
        """The groups of a run, their chains cut."""
        bounds, may_fit = self.bounds.cut(rows)
        for row, bound, fits in zip(rows.tolist(), bounds.tolist(), may_fit.tolist(), strict=True):
            several = self._space.blocks_run_again(row)
            size, order = int(self._space.table.size[row]), order_of(self._space.group(row).base)
            opens: Opens
            if not fits:
                opens = partial(self._rule_out, row, size, len(several))
            elif len(several) > 1:
                opens = partial(self._tell_apart, row, several)
            else:
                opens = partial(self._add_up, row, several[0])
            yield Branch(bound, order, size, opens)

    def _tell_apart(self, row: int, several: Sequence[int]) -> Iterator[Branch[Choice]]:
        """The groups of a row, their chains cut."""
        blocks = np.array(several, np.int64)
        bounds, may_fit = self.bounds.cut(np.full(len(blocks), row), blocks)
        for again, bound, fits in zip(several, bounds.tolist(), may_fit.tolist(), strict=True):
            group = self._space.group(row, again)
            opens: Opens = partial(self._rule_out, row, group.size, 1)
            if fits:
                opens = partial(self._add_up, row, again)
            yield Branch(bound, order_of(group.base), group.size, opens)

    def _rule_out(self, row: int, size: int, groups: int) -> Evaluated[Choice]:
        self.pruned_rows += [row] * groups
        return Evaluated(None, None, size)

    def _add_up(self, row: int, again: int) -> Iterator[Branch[Choice]]:
        group = self._space.group(row, again)
        path = self._scorer.bounds.stage_path(group.base)
        assert path is not None, "the space has no more stages than there are cuts"
        return self.opener.add_up(group, path)


def search_space(
    scorer: Scorer,
    space: Space,
    *,
    known: Sequence[Choice] = (),
    limit_ns: int | None = None,
    most_opened: int | None = None,
    time_limit_s: float | None = None,
    progress: Callable[[str, float], None] | None = None,
    objective: Objective | None = None,
    counts_knobs: bool = True,
) -> Searched:
    """The best of the space and the proof; `ranked` is empty when nothing fits.

    The answer is no worse than the candidates `known`, whenever the time limit ends the search, or
    `most_opened` branches do; with `limit_ns` only shorter steps are looked for.
    Best is the shortest step where no other `objective` is given; the gap is one of its values.
    Without `counts_knobs` the report has no `space_per_knob`.
    """
    searcher = _Searcher(scorer, space)
    branches = list(searcher.branches())
    starts = [(scorer.step_time_ns(*choice), choice) for choice in known]
    valued = None
    if objective is not None:
        valued = Valued(objective, np.unique(space.table.num_devices).tolist())
        branches = [valued.branch(branch) for branch in branches]
        starts = [(valued.value(choice, time_ns), choice) for time_ns, choice in starts]
    total = sum(branch.size for branch in branches)

    def show(opened: int, remaining: int) -> None:
        if progress is not None:
            progress("searching", opened / (opened + remaining + 1))

    search = partial(
        best_first,
        branches,
        known=starts,
        limit_ns=limit_ns,
        most_opened=most_opened,
        time_limit_s=time_limit_s,
        progress=show,
    )
    works: list[Callable[[], Any]] = [search, space.knob_sizes if counts_knobs else dict]
    beside = side_by_side if not space.is_refined else one_by_one
    outcome, knob_sizes = beside(works)
    times_ns = {choice: time_ns for time_ns, choice in outcome.ranked}
    if valued is not None:
        times_ns = {choice: valued.times_ns[choice] for choice in times_ns}
    looked_at = sorted((bound, choice) for choice, bound in searcher.opener.looked_at.items())
    ranked = list(times_ns)
    return Searched(
        ranked=tuple(ranked),
        times_ns={candidate: times_ns[candidate, cuts] for candidate, cuts in ranked},
        report=_report(knob_sizes, total, outcome),
        space=space,
        bounds=searcher.bounds,
        looked_at=[entry for entry in looked_at if entry[1] not in times_ns],
        pruned=searcher.opener.pruned,
        pruned_rows=searcher.pruned_rows,
    )


def _report(knob_sizes: dict[str, int], total: int, outcome: Outcome[Choice]) -> SearchReport:
    simulated = len(outcome.ranked)
    return SearchReport(
        space=total,
        space_per_knob=knob_sizes,
        bound_pruned=total - simulated - outcome.memory_pruned - outcome.left,
        memory_pruned=outcome.memory_pruned,
        simulated=simulated,
        seconds=outcome.seconds,
        gap=outcome.gap,
        left=outcome.left,
    )


def search_closer(
    scorer: Scorer, found: Searched, fix: Mapping[str, Any], objective: Objective | None = None
) -> Searched:
    """The same with the finer knobs at the best plan's pp and tp, where its space left them out.

    Offered everywhere they take minutes in large spaces; at one pp and tp they take a second, and
    what is best there is proven for these two.
    """
    if found.space.is_refined or not found.ranked or not found.report.optimal:
        return found
    best = found.ranked[0]
    own = {**fix, "pp": best[0].pp, "tp": best[0].tp}
    space = Space(scorer.problem, own, found.space.codecs)
    if not space.is_refined:
        return found
    closer = search_space(scorer, space, known=[best], objective=objective, counts_knobs=False)
    better = closer.ranked[: closer.ranked.index(best)]
    return replace(
        found,
        ranked=(*better, *found.ranked),
        times_ns=closer.times_ns | found.times_ns,
        closer=closer.report,
    )
