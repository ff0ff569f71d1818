"""Best-first branch and bound: the best candidate, and the proof that it is.

The searcher knows nothing of models or simulators. It is given *branches*, each with a lower
bound, the number of candidates under it, and a way to open it: into further branches, or by
evaluating the one candidate it stands for. Branches are opened in the order of their bounds until
the next bound is no better than the best time found; then nothing left can win, and the gap is 0.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from sys import maxsize
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Evaluated(Generic[T]):
    """A candidate's simulated time; None for `size` candidates that do not fit in memory.

    `item` is None where they were ruled out together.
    """

    item: T | None
    time_ns: int | None
    size: int = 1


@dataclass(frozen=True, slots=True)
class Branch(Generic[T]):
    """`size` candidates whose times are all at least `bound_ns`; `order` breaks ties."""

    bound_ns: int
    order: tuple[object, ...]
    size: int
    open: Callable[[], Iterable[Branch[T]] | Evaluated[T]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutReport:
    """What was looked at of other cuts of stages than the evenest.

    `groups` of candidates might have been better with another cut, `cuts` of them might, of which
    `simulated` candidates were; of `groups_left` groups not all cuts were looked at. `gap` is how
    much better any candidate of the space with any cut could still be.
    """

    groups: int
    cuts: int
    simulated: int
    groups_left: int
    gap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchReport:
    """What was looked at. `gap` is how much better an unseen candidate could still be.

    It is of stages cut as evenly as they can be; `cuts` says of others, None where nothing does.
    `space` = `bound_pruned` + `memory_pruned` + `simulated` + `left`, which a limit of time kept
    from being looked at. `space_per_knob` is the number of distinct values of each knob.
    """

    space: int
    space_per_knob: dict[str, int]
    bound_pruned: int
    memory_pruned: int
    simulated: int
    seconds: float
    gap: float
    left: int = 0
    cuts: CutReport | None = None

    @property
    def optimal(self) -> bool:
        """Whether no other candidate of the space can be faster."""
        return self.gap == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Generic[T]):
    """All simulated candidates, best first, and the counts.

    `left` candidates were not looked at though they may be faster.
    """

    ranked: tuple[tuple[int, T], ...]
    memory_pruned: int
    left: int
    seconds: float
    gap: float


def best_first(
    branches: Iterable[Branch[T]],
    *,
    known: Iterable[tuple[int, T]] = (),
    limit_ns: int | None = None,
    time_limit_s: float | None = None,
    most_opened: int | None = None,
    is_spent: Callable[[], bool] | None = None,
    progress: Callable[[int, int], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Outcome[T]:
    """Opens branches until the best is proven, or the time limit or `most_opened` is reached.

    Or until `is_spent` says that enough was done.

    `known` are candidates of the space whose times are known: the answer is no worse. With
    `limit_ns` only shorter times are looked for.
    `progress(opened, remaining)` is called after every opening. Equal times are ranked by the
    order in which bounds and `order` put them, so the answer is the same on every run that no
    time limit cut.
    """
    start = clock()
    heap = [(b.bound_ns, b.order, index, b) for index, b in enumerate(branches)]
    heapq.heapify(heap)
    serial, opened, memory_pruned = len(heap), 0, 0
    found = [(time_ns, maxsize, item) for time_ns, item in known]
    best = min((time_ns for time_ns, _, _ in found), default=limit_ns)
    best = best if limit_ns is None or best is None else min(best, limit_ns)
    while heap and (best is None or heap[0][0] < best):
        timed_out = time_limit_s is not None and clock() - start > time_limit_s
        if (timed_out and best is not None) or (most_opened is not None and opened >= most_opened):
            break
        if is_spent is not None and is_spent():
            break
        result = heapq.heappop(heap)[3].open()
        opened += 1
        if isinstance(result, Evaluated):
            if result.time_ns is None or result.item is None:
                memory_pruned += result.size
            else:
                found.append((result.time_ns, opened, result.item))
                best = result.time_ns if best is None else min(best, result.time_ns)
        else:
            for branch in result:
                heapq.heappush(heap, (branch.bound_ns, branch.order, serial, branch))
                serial += 1
        if progress is not None:
            progress(opened, len(heap))
    gap = (best - heap[0][0]) / best if heap and best else 0.0
    remaining = [(entry[0], entry[3].size) for entry in heap]
    found.sort(key=lambda entry: entry[:2])
    return Outcome(
        ranked=tuple((time_ns, item) for time_ns, _, item in found),
        memory_pruned=memory_pruned,
        left=sum(size for bound, size in remaining if best is None or bound < best),
        seconds=clock() - start,
        gap=max(0.0, gap),
    )
