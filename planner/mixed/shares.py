"""Data parallelism over unlike devices: each kind trains by itself on its share of the batch.

Every kind has pipelines of its own, divided as suits it; the gradients of all kinds are summed,
weighted by samples. A share is a multiple of a grain. The time that a kind needs for a share is
that of the best plan on its devices alone, found and proven as on any cluster of equal devices.

No step is shorter than its slowest kind takes alone. So divisions of the batch are looked at best
bound first: a share starts with a bound (`share_bound`), gets its proven time when a division with
it may be the best, and with it the other shares, so that a whole step is soon known. A share is
only searched for plans faster than the best step so far. The search ends when the next bound is no
better than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import comb
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from claw_plan.planner.members import divisors
from claw_plan.planner.mixed.plan import MixedCandidate, pipeline_on
from claw_plan.planner.mixed.score import MixedScorer
from claw_plan.planner.score import Scorer
from claw_plan.planner.search import Branch, Evaluated, best_first
from claw_plan.planner.search_space import Choice, search_space
from claw_plan.planner.space import Space
from claw_plan.simulator.task_graph import Int

MOST_DIVISIONS = 50_000
"""Ways of dividing the batch among the kinds: what fits in a heap in a fraction of a second."""

Best: TypeAlias = tuple[int, Choice]
"""A step time, and the plan that has it."""

GRAINS = (64, 256)
"""A grain is a 64th of the batch or smaller, so that rounding a share costs a device little, and
no smaller than a 256th."""

MOST_SEARCHED = 24
"""Shares whose best plan is searched; each takes about a second on 256 devices."""

MOST_OPENED = 1500
"""Branches of one share's search: some three seconds. Few are not done by then: those of shares
whose plans are short enough but for memory."""

ESTIMATED = 4
"""Divisions that are tried first, each over other kinds: the evenest by an estimate."""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """The divisions that were simulated, best first; `bound_ns` is below every other's step."""

    ranked: tuple[tuple[int, MixedCandidate], ...]
    space: int
    bound_ns: int | None
    seconds: float


@dataclass(frozen=True)
class Shares:
    """Ways of sharing the batch of one problem among its kinds."""

    scorer: MixedScorer
    _best: dict[tuple[int, int], Best | None] = field(default_factory=dict, init=False)
    _slower: dict[tuple[int, int], int] = field(default_factory=dict, init=False)
    _unproven: set[tuple[int, int]] = field(default_factory=set, init=False)

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.scorer.problem.whole.training.global_batch

    @property
    def grain(self) -> int:
        """Samples that move together: of the sizes there may be the evenest.

        What divides by a power of two is shared out in more ways.
        """
        kinds = len(self.scorer.problem.kinds)
        fewest, most = GRAINS
        counts = {size: self.batch // size for size in divisors(self.batch)}
        legal = [
            size
            for size, count in counts.items()
            if count <= most and comb(count + kinds - 1, kinds - 1) <= MOST_DIVISIONS
        ]
        fine = [size for size in legal if counts[size] >= fewest]
        return max(fine, key=lambda size: (size & -size, -size)) if fine else min(legal)

    def alone(self, kind: int, share: int, limit_ns: int | None = None) -> Best | None:
        """The step time and plan of a kind alone with so many samples; None where none fits.

        With `limit_ns` also None where none is shorter, which `least_ns` then knows. `is_proven`
        says whether the search was done with all.
        """
        key = (kind, share)
        if key not in self._best:
            scorer = Scorer(self.scorer.problem.kinds[kind].with_batch(share))
            times = self.scorer.share_bounds[kind].times
            scorer.bounds.times.adopt(times)
            found = search_space(
                scorer,
                Space(scorer.problem, {}),
                limit_ns=limit_ns,
                most_opened=None if limit_ns is None else MOST_OPENED,
            )
            times.adopt(scorer.bounds.times)
            best = found.ranked[0] if found.ranked else None
            if found.report.left:
                self._unproven.add(key)
            elif limit_ns is not None and (best is None or found.times_ns[best[0]] >= limit_ns):
                self._slower[key] = limit_ns
                return None
            self._best[key] = best and (found.times_ns[best[0]], best)
        return self._best[key]

    def fits_nowhere(self, kind: int, share: int) -> bool:
        """Whether no plan for the share fits in the kind's memory, as far as was looked."""
        return self._best.get((kind, share), ()) is None

    def is_proven(self, kind: int, share: int) -> bool:
        """Whether what was found for the share, or that nothing was, is known for certain."""
        return (kind, share) not in self._unproven

    def is_known(self, kind: int, share: int) -> bool:
        """Whether the best plan for the share was found."""
        return self._best.get((kind, share)) is not None

    def least_ns(self, kind: int, share: int) -> int:
        """What a kind needs for a share at least: its best plan's time, or a bound."""
        known = self._best.get((kind, share))
        if known is not None and self.is_proven(kind, share):
            return known[0]
        bound_ns = self.scorer.share_bounds[kind].least_ns(share)
        return max(bound_ns, self._slower.get((kind, share), 0))

    def mixed(self, shares: Sequence[int]) -> MixedCandidate | None:
        """Every kind's best plan for its share, together; None where some share fits nowhere."""
        pipelines = []
        for kind, share in enumerate(shares):
            if not share:
                continue
            best = self.alone(kind, share)
            if best is None:
                return None
            candidate, cuts = best[1]
            pipelines.append(pipeline_on(kind, candidate, cuts, share))
        return MixedCandidate(pipelines=tuple(pipelines))

    def divisions(self) -> Int:
        """All ways of dividing the batch among two kinds or more, one a row."""
        kinds, grains = len(self.scorer.problem.kinds), self.batch // self.grain
        rows = np.array(_divided(grains, kinds), np.int64).reshape(-1, kinds)
        several: Int = rows[(rows > 0).sum(axis=1) > 1]
        return several * np.int64(self.grain)

    def search(
        self,
        *,
        limit_ns: int | None = None,
        time_limit_s: float | None = None,
        most_searched: int = MOST_SEARCHED,
    ) -> Shared:
        """The best division; with `limit_ns` only what may be shorter is looked at."""
        searcher = _Searcher(self, most_searched, limit_ns)
        branches = list(searcher.branches())
        known = searcher.first()
        outcome = best_first(branches, known=known, limit_ns=limit_ns, time_limit_s=time_limit_s)
        best_ns = outcome.ranked[0][0] if outcome.ranked else limit_ns
        bounds = [] if best_ns is None else [round(best_ns * (1 - outcome.gap))]
        return Shared(
            ranked=outcome.ranked,
            space=len(branches),
            bound_ns=min([*bounds, *searcher.left_ns], default=None),
            seconds=outcome.seconds,
        )


@dataclass
class _Searcher:
    """Makes the branches; `left_ns` are bounds of divisions whose shares were not searched."""

    shares: Shares
    searches_left: int
    best_ns: int | None
    left_ns: list[int] = field(default_factory=list)

    def branches(self) -> Iterator[Branch[MixedCandidate]]:
        """One for each division."""
        rows = self.shares.divisions()
        least = np.zeros(len(rows), np.int64)
        for kind in range(rows.shape[1]):
            sizes, which = np.unique(rows[:, kind], return_inverse=True)
            each = [self.shares.least_ns(kind, size) if size else 0 for size in sizes.tolist()]
            least = np.maximum(least, np.array(each, np.int64)[which])
        for division, bound_ns in zip(rows.tolist(), least.tolist(), strict=True):
            yield self._branch(tuple(division), bound_ns)

    def first(self) -> list[tuple[int, MixedCandidate]]:
        """The divisions that should be best, simulated, so that all that follows has a limit.

        A kind is taken to need as much more than its bound for every share as for the whole batch.
        """
        rows, batch = self.shares.divisions(), self.shares.batch
        needed = np.zeros(rows.shape)
        for kind in range(rows.shape[1]):
            if self.shares.is_known(kind, batch):
                bound_ns = self.shares.scorer.share_bounds[kind].least_ns(batch)
                longer = self.shares.least_ns(kind, batch) / max(1, bound_ns)
                sizes, which = np.unique(rows[:, kind], return_inverse=True)
                each = [self.shares.least_ns(kind, n) * longer * (n > 0) for n in sizes.tolist()]
                needed[:, kind] = np.array(each)[which]
        found = []
        for place in _least_of_each(rows > 0, needed.max(axis=1))[:ESTIMATED]:
            division = tuple(rows[place].tolist())
            used = {kind: share for kind, share in enumerate(division) if share}
            least_ns = max(self.shares.least_ns(*one) for one in used.items())
            if self._finds_all(used, least_ns):
                tried = self._simulated(division)
                assert tried.item is not None and tried.time_ns is not None
                found.append((tried.time_ns, tried.item))
        return found

    def _branch(self, division: tuple[int, ...], bound_ns: int) -> Branch[MixedCandidate]:
        return Branch(bound_ns, division, 1, partial(self._open, division, bound_ns))

    def _open(
        self, division: tuple[int, ...], bound_ns: int
    ) -> Iterable[Branch[MixedCandidate]] | Evaluated[MixedCandidate]:
        """The division under a better bound, or simulated where its shares are all known."""
        shares = self.shares
        used = {kind: share for kind, share in enumerate(division) if share}
        if not all(shares.is_proven(*one) for one in used.items()):
            self.left_ns.append(bound_ns)
        if any(shares.fits_nowhere(*one) for one in used.items()):
            return Evaluated(None, None)
        times = {kind: shares.least_ns(kind, share) for kind, share in used.items()}
        if (slowest_ns := max(times.values())) > bound_ns:
            return [self._branch(division, slowest_ns)]
        if self._finds_all(used, bound_ns):
            return self._simulated(division)
        return Evaluated(None, None)

    def _finds_all(self, used: Mapping[int, int], bound_ns: int) -> bool:
        """Searches the shares that are not known, the one that should take longest first."""
        shares = self.shares
        unknown = [kind for kind in used if not shares.is_known(kind, used[kind])]
        for kind in sorted(unknown, key=lambda k: shares.least_ns(k, used[k]), reverse=True):
            if not self.searches_left:
                self.left_ns.append(bound_ns)
                return False
            self.searches_left -= 1
            best = shares.alone(kind, used[kind], self.best_ns)
            if not shares.is_proven(kind, used[kind]):
                self.left_ns.append(bound_ns)
            if best is None:
                return False
        return True

    def _simulated(self, division: tuple[int, ...]) -> Evaluated[MixedCandidate]:
        mixed = self.shares.mixed(division)
        assert mixed is not None, "only what fits is known"
        step_ns = self.shares.scorer.step_time_ns(mixed)
        self.best_ns = step_ns if self.best_ns is None else min(self.best_ns, step_ns)
        return Evaluated(mixed, step_ns)


def _least_of_each(uses: NDArray[np.bool_], needed: NDArray[np.float64]) -> list[int]:
    """Of the rows that use the same kinds the one that needs least, those of the least first."""
    order = np.argsort(needed, kind="stable")
    first = np.unique(uses[order], axis=0, return_index=True)[1]
    places: list[int] = order[np.sort(first)].tolist()
    return places


def _divided(grains: int, kinds: int) -> list[tuple[int, ...]]:
    """All ways of giving grains to kinds."""
    if kinds == 1:
        return [(grains,)]
    return [
        (first, *rest)
        for first in range(grains + 1)
        for rest in _divided(grains - first, kinds - 1)
    ]
