"""Searches the ways over unlike devices: exact cuts, bounds, simulation, and the proof.

Ways lie in the order of a crude bound, cut into runs. A way that may be the best gets the exact
least bottleneck of its stages, first without and then with the memory of each kind. Where its
arrangements are few, all of them are bounded by playing the schedule and simulated in that order;
where they are many, those of the least bottleneck and fewest stages are. What was not looked at
counts with its bound, so the gap holds for every order of kinds and every cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from claw_plan.planner.mixed.bound import MixedBounds
from claw_plan.planner.mixed.cut import (
    Arrangement,
    arrangements,
    bottleneck_ns,
    count_arrangements,
    least_bottleneck,
)
from claw_plan.planner.mixed.plan import MixedCandidate
from claw_plan.planner.mixed.space import REPLICATED, Division, MixedSpace, Way
from claw_plan.planner.search import Branch, Evaluated, best_first

RUN = 1024
"""Ways opened together."""

MOST_ARRANGEMENTS = 3000
"""Of a way with more only the most promising are looked at."""

PROPOSED = 4
"""So many of them, by number of stages."""

MOST_OPENED = 600
"""Branches opened before the search ends with a gap where a plan is known."""

MOST_OPENED_AT_FIRST = 10_000
"""The same where none is known, so that a model that fits only over several kinds gets a plan."""


@dataclass(frozen=True, kw_only=True)
class MixedSearched:
    """The ways that were simulated, best first, and what is known of all others.

    `space` counts ways, each with its best arrangement; `bound_ns` is below every step of the
    space, simulated or not, None where nothing fits.
    """

    ranked: tuple[tuple[int, MixedCandidate], ...]
    space: int
    memory_pruned: int
    bound_ns: int | None
    seconds: float


@dataclass
class _Searcher:
    """Makes the branches."""

    space: MixedSpace
    bounds: MixedBounds
    overhead_ns: int
    best_ns: int | None = None
    left_ns: list[int] = field(default_factory=list)

    def branches(self) -> Iterator[Branch[MixedCandidate]]:
        """Runs of ways."""
        rows, bound_ns, sizes = self.space.rows()
        for start in range(0, len(rows), RUN):
            stop = start + RUN
            opens = partial(self._rows, rows[start:stop], bound_ns[start:stop].tolist())
            size = int(sizes[start:stop].sum())
            yield Branch(int(bound_ns[start]) + self.overhead_ns, (0,), size, opens)

    def _rows(
        self, rows: Sequence[tuple[int, tuple[Division | None, ...]]], bounds: Sequence[int]
    ) -> Iterator[Branch[MixedCandidate]]:
        for (microbatch, divisions), bound in zip(rows, bounds, strict=True):
            way = Way(microbatch, divisions, (REPLICATED,) * len(divisions))
            opens = partial(self._cut, way, bound)
            yield Branch(bound + self.overhead_ns, _order(way), 1, opens)

    @property
    def _limit_ns(self) -> int | None:
        """What a bottleneck must be below to be of use."""
        return None if self.best_ns is None else self.best_ns - self.overhead_ns

    def _cut(self, way: Way, floor_ns: int) -> Iterable[Branch[MixedCandidate]]:
        """The way with its least bottleneck, as if all memory were unlimited."""
        free = self.space.chain(way, limited=False)
        found = least_bottleneck(free, floor_ns, self._limit_ns)
        if found is None:
            return
        for sharing in self.space.sharings(way.divisions):
            own = Way(way.microbatch, way.divisions, sharing)
            opens = partial(self._fit, own, found[0])
            yield Branch(found[0] + self.overhead_ns, _order(own), 1, opens)

    def _fit(
        self, way: Way, floor_ns: int
    ) -> Iterable[Branch[MixedCandidate]] | Evaluated[MixedCandidate]:
        """The same in the memory there is."""
        chain = self.space.chain(way)
        found = least_bottleneck(chain, floor_ns, self._limit_ns)
        if found is None:
            return Evaluated(None, None)
        least_ns, filled = found
        some: Iterable[Arrangement]
        if count_arrangements(chain) <= MOST_ARRANGEMENTS:
            some = arrangements(chain)
        else:
            some = [filled.arrangement(state) for state in filled.ends()[:PROPOSED]]
            self.left_ns.append(least_ns + self.overhead_ns)
        return [
            Branch(
                bottleneck_ns(chain, one) + self.overhead_ns,
                (*_order(way), one),
                1,
                partial(self._play, way, one),
            )
            for one in some
        ]

    def _play(self, way: Way, arrangement: Arrangement) -> Iterable[Branch[MixedCandidate]]:
        """One arrangement, its schedule played."""
        mixed = self.space.mixed(way, arrangement)
        order = (*_order(way), arrangement)

        def evaluate() -> Evaluated[MixedCandidate]:
            scorer = self.space.scorer
            if not scorer.fits(mixed):
                return Evaluated(mixed, None)
            step_ns = scorer.step_time_ns(mixed)
            self.best_ns = step_ns if self.best_ns is None else min(self.best_ns, step_ns)
            return Evaluated(mixed, step_ns)

        return [Branch(self.bounds.step_ns(mixed), order, 1, evaluate)]


def _order(way: Way) -> tuple[object, ...]:
    """Of equal bounds: fewer devices in a stage first, then the simpler division."""
    used = [division for division in way.divisions if division is not None]
    return (1, sum(d.num_devices for d in used), len(used), str(way))


def search_mixed(
    space: MixedSpace,
    *,
    limit_ns: int | None = None,
    time_limit_s: float | None = None,
    most_opened: int | None = None,
) -> MixedSearched:
    """The best of the space; with `limit_ns` only what may be shorter is looked at."""
    overhead_ns = space.scorer.problem.whole.step_overhead_ns()
    searcher = _Searcher(space, MixedBounds(space.scorer), overhead_ns, limit_ns)
    branches = list(searcher.branches())
    if most_opened is None:
        most_opened = MOST_OPENED_AT_FIRST if limit_ns is None else MOST_OPENED
    outcome = best_first(
        branches, limit_ns=limit_ns, time_limit_s=time_limit_s, most_opened=most_opened
    )
    best_ns = outcome.ranked[0][0] if outcome.ranked else limit_ns
    bounds = [] if best_ns is None else [round(best_ns * (1 - outcome.gap))]
    return MixedSearched(
        ranked=outcome.ranked,
        space=sum(branch.size for branch in branches),
        memory_pruned=outcome.memory_pruned,
        bound_ns=min([*bounds, *searcher.left_ns], default=None),
        seconds=outcome.seconds,
    )
