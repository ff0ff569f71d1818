"""Which stages of a chain lie on which kind of device, and where to cut: exact min-max.

A pipeline over unlike devices is as fast as its slowest stage. For a limit T the stages are filled
from the last to the first; the state is how many stages of each kind were used, its value the
first unit that they reach, and each kind's next stage goes as far as T and its memory allow. The
further front is never worse: what a kind may hold of [.., b) it may hold of [.., b') for b' < b,
and a stage with q stages behind it keeps min(m, q + 1) microbatches in 1F1B, whatever the
number of stages before it. So the table answers for every order of the kinds, every cut and every
number of stages at once, and bisection over T finds the least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import comb
from typing import NamedTuple

import numpy as np

from claw_plan.simulator.engine import compiled
from claw_plan.simulator.task_graph import Int

NOWHERE = -1
"""The front of states that no stages reach."""


class Chain(NamedTuple):
    """What stages may be. Axes: kind, way of recomputing, stages behind, unit.

    `total_ns[k, r, u]` is what units before u take on a device of the kind in a whole step;
    `lowest[k, r, q, stop]` the first unit that a stage ending at `stop` may start with by memory,
    `stop` if none (the last q stands for all beyond); `legal[u]` the first unit from u on that a
    stage may start with. At most `most[k]` stages lie on kind k.
    """

    total_ns: Int
    lowest: Int
    legal: Int
    most: Int


class Run(NamedTuple):
    """One stage of an answer: its kind, how it recomputes, and its units."""

    kind: int
    recompute: int
    start: int
    stop: int


Arrangement = tuple[Run, ...]


@dataclass(frozen=True)
class Filled:
    """The table for one limit: of each state its `front` and what its foremost stage is.

    `choice` is kind x ways + way of that stage.
    """

    chain: Chain
    front: Int
    choice: Int

    def ends(self) -> list[int]:
        """The states that hold the whole chain, those of fewest stages first."""
        states = np.flatnonzero(self.front == 0).tolist()
        return sorted(states, key=lambda state: (sum(self._counts(state)), state))

    def arrangement(self, state: int) -> Arrangement:
        """The stages of a state, first to last."""
        ways, strides = self.chain.total_ns.shape[1], _strides(self.chain.most)
        runs = []
        while state:
            kind, way = divmod(int(self.choice[state]), ways)
            before = state - int(strides[kind])
            runs.append(Run(kind, way, int(self.front[state]), int(self.front[before])))
            state = before
        return tuple(runs)

    def _counts(self, state: int) -> list[int]:
        counts = []
        for most in self.chain.most.tolist():
            state, count = divmod(state, most + 1)
            counts.append(count)
        return counts


def least_bottleneck(
    chain: Chain, floor_ns: int = 0, limit_ns: int | None = None
) -> tuple[int, Filled] | None:
    """The least possible time of the slowest stage, and its table; None where nothing fits.

    No bottleneck below `floor_ns` or above `limit_ns` is looked for.
    """
    high = int(chain.total_ns[:, :, -1].max())
    high = high if limit_ns is None else min(high, limit_ns)
    best = fill(chain, high)
    if not (best.front == 0).any():
        return None
    low = min(floor_ns, high)
    while low < high:
        middle = (low + high) // 2
        filled = fill(chain, middle)
        if (filled.front == 0).any():
            best, high = filled, middle
        else:
            low = middle + 1
    return high, best


def bottleneck_ns(chain: Chain, arrangement: Arrangement) -> int:
    """The time of its slowest stage."""
    return max(
        int(
            chain.total_ns[run.kind, run.recompute, run.stop]
            - chain.total_ns[run.kind, run.recompute, run.start]
        )
        for run in arrangement
    )


def fill(chain: Chain, limit_ns: int) -> Filled:
    """The furthest front of every number of stages of each kind."""
    strides = _strides(chain.most)
    states = int((chain.most + 1).prod())
    front, choice = np.full(states, NOWHERE, np.int64), np.zeros(states, np.int64)
    _fill(chain, limit_ns, strides, front, choice)
    return Filled(chain, front, choice)


def _strides(most: Int) -> Int:
    return np.concatenate([[1], np.cumprod(most + 1)[:-1]]).astype(np.int64)


@compiled
def _fill(chain: Chain, limit_ns: int, strides: Int, front: Int, choice: Int) -> None:
    kinds, ways, depth, edges = chain.lowest.shape
    front[0] = edges - 1
    for state in range(1, front.size):
        rest, used = state, 0
        for kind in range(kinds):
            used += rest % (chain.most[kind] + 1)
            rest //= chain.most[kind] + 1
        if used >= edges - 1:  # more stages than there are units but the last
            continue
        behind, best, rest = min(used - 1, depth - 1), edges, state
        for kind in range(kinds):
            count = rest % (chain.most[kind] + 1)
            rest //= chain.most[kind] + 1
            stop = front[state - strides[kind]] if count else NOWHERE
            for way in range(ways if stop > 0 else 0):
                start = _furthest(chain.total_ns[kind, way], stop, limit_ns)
                start = chain.legal[max(start, chain.lowest[kind, way, behind, stop])]
                if start < stop and start < best:
                    best = start
                    choice[state] = kind * ways + way
        if best < edges:
            front[state] = best


@compiled
def _furthest(total_ns: Int, stop: int, limit_ns: int) -> int:
    """The first unit from which on all until `stop` take no more than the limit."""
    low, high = 0, stop
    while low < high:
        middle = (low + high) // 2
        if total_ns[stop] - total_ns[middle] <= limit_ns:
            high = middle
        else:
            low = middle + 1
    return low


def legal_starts(num_units: int, may_start: Sequence[int]) -> Int:
    """`Chain.legal`: 0 for the first stage, else those of `may_start`; the end where none is."""
    legal = np.full(num_units + 1, num_units, np.int64)
    allowed = sorted({0, *may_start})
    place = len(allowed)
    for unit in range(num_units, -1, -1):
        while place and allowed[place - 1] >= unit:
            place -= 1
        if place < len(allowed):
            legal[unit] = allowed[place]
    return legal


def arrangements(chain: Chain) -> Iterator[Arrangement]:
    """All orders and cuts of the chain, each stage in the first way that fits.

    Ways are ordered by time, so that no later one makes a step shorter.
    """
    yield from _complete(chain, len(chain.legal) - 1, (), chain.most.tolist())


def _complete(
    chain: Chain, stop: int, behind: Arrangement, left: list[int]
) -> Iterator[Arrangement]:
    if stop == 0:
        yield behind
        return
    kinds, ways, depth, _ = chain.lowest.shape
    at = min(len(behind), depth - 1)
    for kind in range(kinds):
        end = stop
        for way in range(ways if left[kind] else 0):
            start = int(chain.legal[chain.lowest[kind, way, at, stop]])
            while start < end:
                rest = [count - (index == kind) for index, count in enumerate(left)]
                yield from _complete(chain, start, (Run(kind, way, start, stop), *behind), rest)
                start = int(chain.legal[start + 1])
            end = min(end, int(chain.legal[chain.lowest[kind, way, at, stop]]))


def count_arrangements(chain: Chain) -> int:
    """How many `arrangements` there are, memory aside."""
    end = len(chain.legal) - 1
    inner = len({int(start) for start in chain.legal if 0 < start < end})
    longest = inner + 1
    sequences = [1] + [0] * longest  # of so many stages: in how many orders their kinds may stand
    for most in chain.most.tolist():
        sequences = [
            sum(comb(n, i) * sequences[n - i] for i in range(min(most, n) + 1))
            for n in range(longest + 1)
        ]
    return sum(comb(inner, n - 1) * sequences[n] for n in range(1, longest + 1))
