"""Where to cut the chain of units into pipeline stages: exact min-max over contiguous runs.

The slowest stage sets the pace of a pipeline and the sum of all stages does not depend on the
cuts, so the best cut minimises the largest stage. A stage is a run of at least one block; the
prologue stays with the first block and the epilogue with the last.

The bottleneck T is found by bisection over a feasibility test: filling stages from the last to
the first, each as far as T and its memory allow, reaches the front whenever any cut does (a stage
that may hold units [a, b) may hold [a', b) for a' > a). Filling from the back leaves the early
stages light, which are those that hold the most microbatches in flight.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

Fits = Callable[[int, int, int], bool]
"""fits(stage, start, stop): whether units [start, stop) may be that stage."""


def cut_chain(
    times_ns: Sequence[int],
    num_stages: int,
    may_start: Sequence[int],
    fits: Fits | None = None,
) -> tuple[tuple[int, int], ...] | None:
    """Runs [start, stop) of units, one a stage, whose largest total time is the least possible.

    `times_ns` has one entry a unit (prologue and epilogue included); `may_start` are the unit
    indices at which a stage after the first may begin. None when no cut fits.
    """
    starts = sorted(set(may_start))
    if num_stages - 1 > len(starts):
        return None
    total = [0, *accumulate(times_ns)]
    edges = [0, *starts, len(times_ns)]
    low, high = -(-total[-1] // num_stages), total[-1]
    best = _fill(total, edges, num_stages, high, fits)
    if best is None:
        return None
    while low < high:
        middle = (low + high) // 2
        cut = _fill(total, edges, num_stages, middle, fits)
        if cut is None:
            low = middle + 1
        else:
            best = cut
            high = min(middle, max(total[stop] - total[start] for start, stop in cut))
    return best


def _fill(
    total: list[int], edges: list[int], num_stages: int, limit_ns: int, fits: Fits | None
) -> tuple[tuple[int, int], ...] | None:
    """Fills stages from the last; `edges` are the legal boundaries in order."""
    stages: list[tuple[int, int]] = []
    at = [total[edge] for edge in edges]
    stop = len(edges) - 1
    for stage in reversed(range(num_stages)):
        start = stop
        # `stage` edges must remain in front, one stage each; the first stage takes all the rest.
        lowest = 0 if stage == 0 else stage
        furthest = bisect_left(at, at[stop] - limit_ns, lowest, stop)
        if fits is None:
            start = furthest
        while start > furthest and fits and fits(stage, edges[start - 1], edges[stop]):
            start -= 1
        if start == stop:
            return None
        stages.append((edges[start], edges[stop]))
        stop = start
    return tuple(reversed(stages)) if stop == 0 else None
