"""Gradients of a stage to the buckets that are averaged together, and when each is complete.

DistributedDataParallel's order where the library averages, that of `communication.reducer` where
the executor does, and an optimizer's own where its momentum travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from sys import maxsize
from typing import NamedTuple

from claw_plan.planner.averaging import sends_momentum
from claw_plan.planner.bucket_plan import filled_buckets
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.graph import Parameter
from claw_plan.planner.low_rank import Shapes, is_low_rank
from claw_plan.planner.problem import STORED_BYTES

MOMENTUM_BUCKET_BYTES = 25 * 2**20
"""Of the vectors that such an optimizer sends (executor.optimizers.buckets.BUCKET_BYTES)."""

AFTER_ALL = -1
"""The unit of the bucket that holds what is left when all have run."""


class Bucket(NamedTuple):
    """Gradients that are averaged together, once the backward of a unit has run."""

    unit: int
    elements: int
    shapes: Shapes = ()
    """Of its tensors, where it matters how elements lie in matrices."""
    alike: int = 0
    """Elements of momentum that all tensor-parallel ranks hold, until codes make them unlike."""


def buckets_of(
    held: Sequence[tuple[Parameter, int]],
    units: range,
    candidate: Candidate,
    optimizer: str | None,
) -> tuple[Bucket, ...]:
    """The buckets of trained parameters, in the model's order with their elements on a rank.

    `units` are those of the stage. What the library does not average is filled from the model's
    last parameter to its first; momentum, after all, from its first to its last.
    """
    if sends_momentum(candidate, optimizer):
        sizes = filled_buckets(
            (STORED_BYTES * elements for _, elements in held), MOMENTUM_BUCKET_BYTES
        )
        remaining = iter(held)
        return tuple(_of_momentum([*islice(remaining, size)], candidate.tp) for size in sizes)
    if candidate.buckets:
        sizes = candidate.buckets
        return _shaped(held, sizes, candidate, _planned(held, sizes, candidate.bucket_order))
    if candidate.codec != "none" or candidate.collective != "auto":
        last_first = (STORED_BYTES * count for _, count in reversed(held))
        sizes = filled_buckets(last_first, candidate.bucket_bytes)
        return _shaped(held, sizes, candidate, _planned(held, sizes))
    return _filled(held, units, candidate.bucket_bytes)


def _of_momentum(held: Sequence[tuple[Parameter, int]], tp: int) -> Bucket:
    whole = sum(elements for parameter, elements in held if parameter.tp_dim is None)
    elements = sum(elements for _, elements in held)
    return Bucket(AFTER_ALL, elements, alike=whole if tp > 1 else 0)


def _shaped(
    held: Sequence[tuple[Parameter, int]],
    sizes: Sequence[int],
    candidate: Candidate,
    buckets: tuple[Bucket, ...],
) -> tuple[Bucket, ...]:
    """Buckets that leave in turn, with the shapes of what lies in each if that matters."""
    if not is_low_rank(candidate):
        return buckets
    remaining = iter(reversed(held))
    return tuple(
        bucket._replace(shapes=tuple(p.shape for p, _ in islice(remaining, size)))
        for bucket, size in zip(buckets, sizes, strict=True)
    )


def _planned(
    held: Sequence[tuple[Parameter, int]], sizes: Sequence[int], order: Sequence[int] = ()
) -> tuple[Bucket, ...]:
    """Of so many parameters each, last to first, as they leave: none before those before it."""
    buckets, unit = buckets_by_use(held, sizes), maxsize
    leaving = []
    for number in order or range(len(buckets)):
        unit = min(unit, buckets[number].unit)
        leaving.append(buckets[number]._replace(unit=unit))
    return tuple(leaving)


def buckets_by_use(
    held: Sequence[tuple[Parameter, int]], sizes: Sequence[int]
) -> tuple[Bucket, ...]:
    """Of so many parameters each, last to first, with the first unit that uses one of them.

    With its backward the bucket's gradients are complete, and its forward needs them first.
    """
    remaining, buckets = iter(reversed(held)), []
    for size in sizes:
        own = list(islice(remaining, size))
        first = min(min(parameter.units, default=0) for parameter, _ in own)
        buckets.append(Bucket(first, sum(elements for _, elements in own)))
    return tuple(buckets)


def _filled(
    held: Sequence[tuple[Parameter, int]], units: range, bucket_bytes: int
) -> tuple[Bucket, ...]:
    """DistributedDataParallel's: full once they hold `bucket_bytes`.

    In the order in which gradients are complete (torch's reducer.cpp,
    compute_bucket_assignment_by_size).
    """
    collected, buckets = 0, []
    complete: dict[int, list[tuple[Parameter, int]]] = {unit: [] for unit in units}
    for parameter, elements in held:
        complete[min(parameter.units, default=0)].append((parameter, elements))
    for unit in reversed(units):
        for _, elements in sorted(complete[unit], key=lambda entry: entry[0].arrival):
            collected += elements
            if STORED_BYTES * collected >= bucket_bytes:
                buckets.append(Bucket(unit, collected))
                collected = 0
    if collected:
        buckets.append(Bucket(AFTER_ALL, collected))
    return tuple(buckets)
