"""Ready times of gradients and the price of a message become the buckets that finish first.

Gradients come in one order, that of `ready_ns`, and leave in buckets of neighbours over one link,
one bucket after the other. Few buckets wait for their last gradient, many pay for starting each
time. `plan_buckets` finds the boundaries whose last bucket arrives first, exactly; `finish_ns`
says when the buckets of any boundaries do. Nothing here knows of models: `bucket_choice` reads
ready times off a simulated step, and `executor.bucket_times` off a real one.

    F_j = min over i < j of  max(F_i, r_j) + cost(size of i+1..j)

    F_j  when the first j gradients have been exchanged, ns; F_0 = 0
    r_j  when gradient j and all before it are complete, ns

Source: optimal merging of gradients, S. Shi, X. Chu, B. Li, "MG-WFBP: Efficient Data Communication
for Distributed Synchronous SGD Algorithms", INFOCOM 2019, which merges greedily; the recurrence is
over all boundaries. It is exact: a prefix that is exchanged sooner never makes a later one worse.
Assumes: buckets take turns on the link. Not modelled: what else uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from claw_plan.planner.errors import PlanError

Int = NDArray[np.int64]

Cost = Callable[[Int], Int]
"""Numbers of elements, those of a bucket each, to the time of its exchange alone in ns: start,
bytes on the wire, encoding and decoding. More elements never take less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """The gradients of a step in the order in which they leave.

    `ready_ns` is when each is complete, from any moment on; `numels` are their elements.
    """

    ready_ns: tuple[int, ...]
    numels: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.ready_ns) != len(self.numels) or not self.numels:
            raise PlanError(
                f"a ready time and a size of each gradient, at least one, but got "
                f"{len(self.ready_ns)} and {len(self.numels)}"
            )

    @property
    def complete_ns(self) -> tuple[int, ...]:
        """When each and all before it are complete: a bucket leaves no sooner."""
        return tuple(accumulate(self.ready_ns, max))

    def elements_before(self) -> Int:
        """Elements of the first j gradients, for j from 0 on."""
        return np.array([0, *accumulate(self.numels)], dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """How many gradients go into each bucket, and when the last bucket has arrived."""

    sizes: tuple[int, ...]
    finish_ns: int


def affine_cost(start_ns: int, ns_per_byte: float, bytes_per_element: float) -> Cost:
    """Every bucket costs its start and its bytes; rounded up."""

    def cost(elements: Int) -> Int:
        found: Int = np.ceil(elements * (bytes_per_element * ns_per_byte)).astype(np.int64)
        return start_ns + found

    return cost


def plan_buckets(gradients: Gradients, cost: Cost) -> BucketPlan:
    """The buckets whose last arrives first; of equally good ones, few."""
    before, complete = gradients.elements_before(), gradients.complete_ns
    count = len(complete)
    finish = np.zeros(count + 1, dtype=np.int64)
    begins = [0] * (count + 1)
    for end in range(1, count + 1):
        starts = np.maximum(finish[:end], complete[end - 1])
        arrives = starts + cost(before[end] - before[:end])
        begins[end] = int(arrives.argmin())  # the first of equals: the longest bucket
        finish[end] = arrives[begins[end]]
    return BucketPlan(sizes=_sizes(begins), finish_ns=int(finish[count]))


def _sizes(begins: Sequence[int]) -> tuple[int, ...]:
    """Walks back from the last bucket; `begins[j]` is where the bucket that ends at j begins."""
    sizes, end = [], len(begins) - 1
    while end:
        sizes.append(end - begins[end])
        end = begins[end]
    return tuple(reversed(sizes))


def arrivals_ns(gradients: Gradients, sizes: Sequence[int], cost: Cost) -> tuple[int, ...]:
    """When each bucket of these sizes has arrived."""
    check_sizes(sizes, len(gradients.numels))
    ends = list(accumulate(sizes))
    before, complete = gradients.elements_before(), gradients.complete_ns
    last = before[ends]
    costs = cost(np.diff(last, prepend=0))
    arrived, found = 0, []
    for end, duration in zip(ends, costs.tolist(), strict=True):
        arrived = max(arrived, complete[end - 1]) + duration
        found.append(arrived)
    return tuple(found)


def finish_ns(gradients: Gradients, sizes: Sequence[int], cost: Cost) -> int:
    """When the last bucket of these sizes has arrived."""
    return arrivals_ns(gradients, sizes, cost)[-1]


def filled_buckets(sizes_bytes: Iterable[int], bucket_bytes: int) -> tuple[int, ...]:
    """Numbers of gradients where a bucket is full once it holds `bucket_bytes`.

    So DistributedDataParallel does it (torch's reducer.cpp, compute_bucket_assignment_by_size).
    """
    sizes, held, count = [], 0, 0
    for size in sizes_bytes:
        held, count = held + size, count + 1
        if held >= bucket_bytes:
            sizes.append(count)
            held = count = 0
    return (*sizes, count) if count else tuple(sizes)


def check_sizes(sizes: Sequence[int], count: int) -> None:
    """Raises PlanError unless the buckets hold each of `count` gradients once."""
    empty = next((size for size in sizes if size < 1), None)
    if empty is not None:
        raise PlanError(f"each bucket holds at least one gradient, but got {empty} in {[*sizes]}")
    if sum(sizes) != count:
        raise PlanError(
            f"buckets hold the {count} trained parameters once each, but {[*sizes]} hold "
            f"{sum(sizes)}"
        )
