"""Buckets as DistributedDataParallel, the plan and momentum's optimizers make them."""

from __future__ import annotations

from dataclasses import replace

from claw_plan.planner.averaging_buckets import AFTER_ALL, buckets_of
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.graph import Parameter


def parameter(name, unit, arrival=0):
    return Parameter(
        names=(name,), shape=(1,), dtype="float32", trainable=True, units=(unit,), arrival=arrival
    )


def sizes(*args):
    """Unit and elements of each bucket."""
    return tuple(bucket[:2] for bucket in buckets_of(*args))


def test_buckets_fill_in_the_order_of_completion():
    """Last unit first, inside a unit by arrival; full at 40 bytes, that is ten elements."""
    held = [
        (parameter("a", 0), 3),
        (parameter("b", 1, arrival=2), 4),
        (parameter("c", 1, arrival=1), 9),
        (parameter("d", 2), 2),
    ]
    full_at_40, full_at_4 = (Candidate(bucket_bytes=size) for size in (40, 4))
    assert sizes(held, range(3), full_at_40, None) == ((1, 11), (AFTER_ALL, 7))
    assert sizes(held, range(3), full_at_4, None) == ((2, 2), (1, 9), (1, 4), (0, 3))
    assert sizes([], range(3), full_at_40, None) == ()


def test_planned_buckets_hold_parameters_from_the_last_and_wait_for_those_before():
    """A table that units 0 and 2 use is complete with unit 0, and holds back what follows it."""
    table = replace(parameter("table", 0), units=(0, 2))
    held = [(parameter("a", 0), 3), (parameter("b", 1), 4), (table, 5), (parameter("d", 2), 2)]
    assert sizes(held, range(3), Candidate(buckets=(1, 1, 2)), None) == (
        (2, 2),
        (0, 5),
        (0, 7),
    )


def test_buckets_tell_low_rank_what_they_consist_of():
    held = [(replace(parameter("a", 0), shape=(3, 5)), 15), (parameter("b", 1), 1)]
    low_rank = Candidate(dp_replicate=2, codec="low_rank", bucket_bytes=4)
    assert buckets_of(held, range(2), low_rank, "adamw") == (
        (1, 1, ((1,),), 0), (0, 15, ((3, 5),), 0),
    )  # fmt: skip
    one = replace(low_rank, bucket_bytes=100)
    assert buckets_of(held, range(2), one, "adamw") == ((0, 16, ((1,), (3, 5)), 0),)


def test_momentum_travels_after_the_backward_in_buckets_of_its_own():
    """From the first parameter on, full at 25 MiB; plain SGD has none, and sends gradients."""
    mib = 2**20 // 4
    held = [
        (parameter("a", 0), 20 * mib), (parameter("b", 1), 6 * mib), (parameter("c", 2), mib),
    ]  # fmt: skip
    one_bit = Candidate(dp_replicate=2, codec="one_bit", bucket_bytes=4, buckets=(2, 1))
    momentum = ((AFTER_ALL, 26 * mib), (AFTER_ALL, mib))
    assert sizes(held, range(3), one_bit, "adamw") == momentum
    assert sizes(held, range(3), one_bit, "sgd") == ((1, 7 * mib), (0, 20 * mib))
