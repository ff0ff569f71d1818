"""Arithmetic on stretches of time: unions, overlaps, and nested calls made flat.

Intervals are two arrays of equal length, starts and ends, in nanoseconds. A *union* is sorted,
disjoint and without empty intervals.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]


class Intervals(NamedTuple):
    """Starts and ends."""

    start: Int
    end: Int

    @property
    def length(self) -> int:
        """Sum of all; of a union the time it covers."""
        return int((self.end - self.start).sum())

    def __bool__(self) -> bool:
        return len(self.start) > 0


NONE = Intervals(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def intervals(pairs: list[tuple[int, int]]) -> Intervals:
    """From pairs of start and end."""
    rows = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return Intervals(rows[:, 0], rows[:, 1])


def union(start: Int, end: Int) -> Intervals:
    """The time that at least one interval covers."""
    keep = end > start
    start, end = start[keep], end[keep]
    if not len(start):
        return NONE
    order = np.argsort(start, kind="stable")
    start, reached = start[order], np.maximum.accumulate(end[order])
    opens = np.ones(len(start), dtype=bool)
    opens[1:] = start[1:] > reached[:-1]
    first = np.flatnonzero(opens)
    last = np.append(first[1:] - 1, len(start) - 1)
    return Intervals(start[first], reached[last])


def clip(some: Intervals, low: int, high: int) -> Intervals:
    """The parts within low to high."""
    start, end = np.maximum(some.start, low), np.minimum(some.end, high)
    keep = end > start
    return Intervals(start[keep], end[keep])


def subtract(base: Intervals, other: Intervals) -> Intervals:
    """The time of the union `base` that the union `other` does not cover."""
    if not base or not other:
        return base
    # At each edge the depth changes: base counts 2, other 1; kept is where the depth is exactly 2.
    points = np.concatenate([base.start, base.end, other.start, other.end])
    steps = np.repeat([2, -2, 1, -1], [len(base.start)] * 2 + [len(other.start)] * 2)
    order = np.argsort(points, kind="stable")
    points, depth = points[order], np.cumsum(steps[order])
    keep = (depth[:-1] == 2) & (points[1:] > points[:-1])
    return union(points[:-1][keep], points[1:][keep])


def overlap_ns(first: Intervals, second: Intervals) -> int:
    """How long both unions cover."""
    return first.length - subtract(first, second).length


def inside(times: Int, some: Intervals) -> NDArray[np.bool_]:
    """Which of the times lie in the union."""
    if not some:
        return np.zeros(len(times), dtype=bool)
    place = np.searchsorted(some.start, times, side="right") - 1
    return np.asarray((place >= 0) & (times < some.end[np.maximum(place, 0)]))


def flatten(start: Int, end: Int, label: Int) -> tuple[Int, Int, Int, Int]:
    """Nested calls of one thread as disjoint stretches: (start, end, label, outermost's label).

    Each instant belongs to the innermost call. A call that outlives its caller, which a broken
    recording shows, ends with it.
    """
    order = np.lexsort((-end, start))
    rows: list[tuple[int, int, int, int]] = []
    open_ends: list[int] = []
    open_labels: list[int] = []
    reached = 0

    def advance(to: int) -> None:
        nonlocal reached
        while open_ends and open_ends[-1] <= to:
            if open_ends[-1] > reached:
                rows.append((reached, open_ends[-1], open_labels[-1], open_labels[0]))
                reached = open_ends[-1]
            open_ends.pop()
            open_labels.pop()
        if open_ends and to > reached:
            rows.append((reached, to, open_labels[-1], open_labels[0]))
        reached = max(reached, to)

    for begin, stop, what in zip(
        start[order].tolist(), end[order].tolist(), label[order].tolist(), strict=True
    ):
        advance(begin)
        open_ends.append(min(stop, open_ends[-1]) if open_ends else stop)
        open_labels.append(what)
    if open_ends:
        advance(open_ends[0])
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    return table[:, 0], table[:, 1], table[:, 2], table[:, 3]
