"""Data parallelism over unlike devices: each kind trains by itself on its share of the batch.

Every kind has pipelines of its own, divided as suits it; the gradients of all kinds are summed,
weighted by samples. A share is a multiple of a grain. The time that a kind needs for a share is
that of the best plan on its devices alone, found and proven as on any cluster of equal devices.
Shares start as the kinds' speeds on the whole batch are, and move from the slowest to the others
as long as the slowest gets faster; every division seen is simulated as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from claw_plan.planner.members import divisors
from claw_plan.planner.mixed.plan import MixedCandidate, pipeline_on
from claw_plan.planner.mixed.score import MixedScorer
from claw_plan.planner.score import Scorer
from claw_plan.planner.search_space import Choice, search_space
from claw_plan.planner.space import Space

MOST_GRAINS = 64
"""Shares are 64ths of the batch, or as close to that as the batch divides."""

MOST_DIVIDED = 1000
"""Divisions of the batch that are all looked at; of more only those on the way to the best."""


@dataclass(frozen=True)
class Shares:
    """Ways of sharing the batch of one problem among its kinds."""

    scorer: MixedScorer
    _best: dict[tuple[int, int], tuple[int, Choice] | None] = field(
        default_factory=dict, init=False
    )

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.scorer.problem.whole.training.global_batch

    @property
    def grain(self) -> int:
        """Samples that move together."""
        return min(
            divisor for divisor in divisors(self.batch) if self.batch // divisor <= MOST_GRAINS
        )

    def alone(self, kind: int, share: int) -> tuple[int, Choice] | None:
        """The step time and plan of a kind alone with so many samples; None where none fits."""
        key = (kind, share)
        if key not in self._best:
            scorer = Scorer(self.scorer.problem.kinds[kind].with_batch(share))
            found = search_space(scorer, Space(scorer.problem, {}))
            best = found.ranked[0] if found.ranked else None
            self._best[key] = best and (found.times_ns[best[0]], best)
        return self._best[key]

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

    def slowest_ns(self, shares: Sequence[int]) -> int | None:
        """The time of the slowest kind, alone: no step with these shares is shorter."""
        times = [self.alone(kind, share) for kind, share in enumerate(shares) if share]
        known = [time[0] for time in times if time is not None]
        return max(known) if len(known) == len(times) else None

    def candidates(self) -> Iterator[tuple[int, ...]]:
        """Divisions of the batch among two kinds or more that are worth a simulation."""
        kinds, grains = len(self.scorer.problem.kinds), self.batch // self.grain
        every = _divisions(grains, kinds)
        if len(every) <= MOST_DIVIDED and grains < MOST_GRAINS // 4:
            yield from (tuple(self.grain * part for part in parts) for parts in every)
            return
        able = [kind for kind in range(kinds) if self.alone(kind, self.batch) is not None]
        best_ns = float("inf")
        for size in range(len(able), 1, -1):
            for used in combinations(able, size):
                # Fewer kinds are slower unless another spoils what they do together.
                if 1 / sum(1 / self._time(kind, self.batch) for kind in used) >= best_ns:
                    continue
                for shares in self._descent(used):
                    yield shares
                    slowest_ns = self.slowest_ns(shares)
                    best_ns = min(best_ns, slowest_ns) if slowest_ns is not None else best_ns

    def _descent(self, used: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """From shares as speeds are, always to the better."""
        shares = self._as_speeds(used)
        seen = {shares}
        best = self.slowest_ns(shares)
        yield shares
        while best is not None:
            slowest = max(used, key=lambda kind: self._time(kind, shares[kind]))
            moves = [_moved(shares, slowest, to, self.grain) for to in used if to != slowest]
            timed = [
                (ns, move)
                for move in moves
                if move not in seen and move[slowest] > 0
                if (ns := self.slowest_ns(move)) is not None
            ]
            seen.update(moves)
            if not timed or min(timed)[0] >= best:
                return
            best, shares = min(timed)
            yield shares

    def _time(self, kind: int, share: int) -> int:
        best = self.alone(kind, share)
        return best[0] if best is not None else 0

    def _as_speeds(self, used: tuple[int, ...]) -> tuple[int, ...]:
        """Grains to the kinds so that the slowest is as fast as can be: always to the soonest."""
        each = {kind: self._time(kind, self.batch) / self.batch for kind in used}
        shares = [self.grain * (kind in used) for kind in range(len(self.scorer.problem.kinds))]
        for _ in range(self.batch // self.grain - len(used)):
            soonest = min(used, key=lambda kind: (shares[kind] + self.grain) * each[kind])
            shares[soonest] += self.grain
        return tuple(shares)


def _moved(shares: tuple[int, ...], source: int, to: int, grain: int) -> tuple[int, ...]:
    moved = list(shares)
    moved[source] -= grain
    moved[to] += grain
    return tuple(moved)


def _divisions(grains: int, kinds: int) -> list[tuple[int, ...]]:
    """All ways of giving grains to kinds, two of them at least."""
    if kinds == 1:
        return [(grains,)]
    found = [
        (first, *rest) for first in range(grains + 1) for rest in _all(grains - first, kinds - 1)
    ]
    return [parts for parts in found if sum(part > 0 for part in parts) > 1]


def _all(grains: int, kinds: int) -> list[tuple[int, ...]]:
    if kinds == 1:
        return [(grains,)]
    return [
        (first, *rest) for first in range(grains + 1) for rest in _all(grains - first, kinds - 1)
    ]
