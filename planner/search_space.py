"""Searches a `Space` with a `Scorer`: bounds whole groups, opens the promising, proves the rest.

A candidate whose best stage cut does not fit in memory gets a second chance with the best cut
that does; only when there is none is it pruned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from claw_plan.planner.bound import Cuts, StagePath
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.memory import make_fits
from claw_plan.planner.score import Scorer
from claw_plan.planner.search import Branch, Evaluated, SearchReport, best_first
from claw_plan.planner.space import Group, Space

Choice: TypeAlias = tuple[Candidate, Cuts]


@dataclass(frozen=True, kw_only=True)
class Searched:
    """The candidates that were simulated, best first, with their cuts; and what was not.

    `groups` holds every group with its crudest bound, `pruned` the candidates memory ruled out
    with their cuts, `times_ns` the simulated times by candidate.
    """

    ranked: tuple[Choice, ...]
    times_ns: dict[Candidate, int]
    report: SearchReport
    groups: list[tuple[int, Group]] = field(repr=False)
    pruned: list[Choice] = field(repr=False)


class _Searcher:
    """Makes the branches; keeps what explanations need."""

    def __init__(self, scorer: Scorer, space: Space) -> None:
        self._scorer, self._space = scorer, space
        self.groups: list[tuple[int, Group]] = []
        self.pruned: list[Choice] = []

    def branches(self) -> Iterator[Branch[Choice]]:
        """Every group under its crudest bound; the stage cut waits until that is not enough."""
        for group in self._space.groups():
            bound = self._scorer.bounds.even_ns(group.base)
            self.groups.append((bound, group))
            yield Branch(bound, _order(group.base), group.size, partial(self._cut, group))

    def _cut(self, group: Group) -> Iterator[Branch[Choice]]:
        bound = self._scorer.bounds.compute_ns(group.base)
        yield Branch(bound, _order(group.base), group.size, partial(self._members, group))

    def _members(self, group: Group) -> Iterator[Branch[Choice]]:
        for candidate in self._space.members(group):
            path = self._scorer.bounds.stage_path(candidate)
            assert path is not None, "the group's bound came from this path"
            yield self._leaf(candidate, path, first_try=True)

    def _leaf(self, candidate: Candidate, path: StagePath, first_try: bool) -> Branch[Choice]:
        bound = self._scorer.bounds.candidate_ns(candidate, path)

        def evaluate() -> Evaluated[Choice] | Iterable[Branch[Choice]]:
            choice = (candidate, path.cuts)
            if self._scorer.memory.fits(*choice):
                return Evaluated(choice, self._scorer.step_time_ns(*choice))
            if first_try and candidate.pp > 1 and candidate.stages_per_rank == 1:
                fits = make_fits(self._scorer.memory, candidate)
                other = self._scorer.bounds.stage_path(candidate, fits)
                if other is not None:
                    return [self._leaf(candidate, other, first_try=False)]
            self.pruned.append(choice)
            return Evaluated(choice, None)

        return Branch(bound, _order(candidate), 1, evaluate)


def _order(candidate: Candidate) -> tuple[object, ...]:
    """Of equal bounds: fewer devices first, then simpler splits, then less recompute."""
    return (
        candidate.num_devices, candidate.pp, candidate.tp, candidate.recompute != "none",
        candidate.sequence_parallel, candidate.dp_shard, candidate.offload != "none",
        candidate.microbatch_size, candidate.stages_per_rank, candidate.schedule,
        -candidate.zero,
    )  # fmt: skip


def search_space(
    scorer: Scorer,
    space: Space,
    *,
    time_limit_s: float | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Searched:
    """The best of the space and the proof; `ranked` is empty when nothing fits."""
    searcher = _Searcher(scorer, space)
    branches = list(searcher.branches())
    total = sum(branch.size for branch in branches)

    def show(opened: int, remaining: int) -> None:
        if progress is not None:
            progress("searching", opened / (opened + remaining + 1))

    outcome = best_first(branches, time_limit_s=time_limit_s, progress=show)
    simulated = len(outcome.ranked)
    report = SearchReport(
        space=total,
        space_per_knob=knob_sizes([group for _, group in searcher.groups], space),
        bound_pruned=total - simulated - outcome.memory_pruned,
        memory_pruned=outcome.memory_pruned,
        simulated=simulated,
        seconds=outcome.seconds,
        gap=outcome.gap,
    )
    return Searched(
        ranked=tuple(choice for _, choice in outcome.ranked),
        times_ns={candidate: time_ns for time_ns, (candidate, _) in outcome.ranked},
        report=report,
        groups=searcher.groups,
        pruned=searcher.pruned,
    )


def knob_sizes(groups: list[Group], space: Space) -> dict[str, int]:
    """Distinct values of each knob in the space."""
    values: dict[str, set[object]] = {}
    shapes: dict[tuple[object, ...], Group] = {}
    for group in groups:
        base = group.base
        for knob in (
            "pp", "tp", "microbatch_size", "recompute", "sequence_parallel", "stages_per_rank",
        ):  # fmt: skip
            values.setdefault(knob, set()).add(getattr(base, knob))
        values.setdefault("devices", set()).add(base.num_devices)
        key = (base.pp > 1, base.tp > 1, base.dp, group.microbatches > 1, base.schedule)
        shapes.setdefault(key, group)
    for group in shapes.values():
        for candidate in space.members(group):
            for knob in ("dp_replicate", "dp_shard", "zero", "schedule", "offload"):
                values.setdefault(knob, set()).add(getattr(candidate, knob))
    return {knob: len(distinct) for knob, distinct in sorted(values.items())}
