"""Bucket boundaries: equal to brute force, to times by hand, and never behind filled buckets."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.planner.bucket_plan import (
    Cost,
    Gradients,
    Int,
    affine_cost,
    arrivals_ns,
    check_sizes,
    filled_buckets,
    finish_ns,
    plan_buckets,
)
from claw_plan.planner.errors import PlanError


def all_boundaries(count: int) -> Iterator[tuple[int, ...]]:
    """Every way of cutting a row of `count` into runs: 2^(count-1)."""
    for cuts in product((False, True), repeat=count - 1):
        ends = [i + 1 for i, cut in enumerate(cuts) if cut] + [count]
        yield tuple(np.diff([0, *ends]).tolist())


def played(gradients: Gradients, sizes: tuple[int, ...], start: int, per_element: int) -> int:
    """The same by a loop over time that knows nothing of the recurrence."""
    now, position = 0, 0
    for size in sizes:
        members = range(position, position + size)
        waited = max(gradients.ready_ns[: position + size])
        now = max(now, waited) + start + per_element * sum(gradients.numels[i] for i in members)
        position += size
    return now


def two_pieces(elements: Int) -> Int:
    """A codec's price: by whole kilobytes, so no straight line."""
    found: Int = 3 + 5 * np.ceil(elements / 1024).astype(np.int64)
    return found


GRADIENTS = st.lists(
    st.tuples(st.integers(0, 2000), st.integers(1, 5000)), min_size=1, max_size=10
).map(lambda rows: Gradients(ready_ns=tuple(r for r, _ in rows), numels=tuple(n for _, n in rows)))


@settings(max_examples=60, deadline=None)
@given(GRADIENTS, st.integers(0, 900), st.integers(0, 3))
def test_no_boundaries_of_all_finish_sooner(gradients: Gradients, start: int, slope: int) -> None:
    cost = affine_cost(start, slope, 1)
    plan = plan_buckets(gradients, cost)
    every = [
        played(gradients, sizes, start, slope) for sizes in all_boundaries(len(gradients.numels))
    ]
    assert plan.finish_ns == min(every)
    assert finish_ns(gradients, plan.sizes, cost) == plan.finish_ns


def test_sixteen_gradients_against_all_32768_boundaries() -> None:
    random = np.random.default_rng(0)
    ready = tuple(int(r) for r in np.cumsum(random.integers(0, 400, 16)))
    gradients = Gradients(ready_ns=ready, numels=tuple(random.integers(1, 300, 16).tolist()))
    every = (played(gradients, sizes, 150, 2) for sizes in all_boundaries(16))
    assert plan_buckets(gradients, affine_cost(150, 2, 1)).finish_ns == min(every)


@settings(max_examples=40, deadline=None)
@given(GRADIENTS)
def test_a_price_that_is_no_straight_line_is_planned_exactly_too(gradients: Gradients) -> None:
    plan = plan_buckets(gradients, two_pieces)
    every = all_boundaries(len(gradients.numels))
    assert plan.finish_ns == min(finish_ns(gradients, sizes, two_pieces) for sizes in every)


@settings(deadline=None)
@given(GRADIENTS, st.integers(0, 900), st.integers(1, 40_000))
def test_never_behind_buckets_that_are_filled_to_a_size(
    gradients: Gradients, start: int, bucket_bytes: int
) -> None:
    cost = affine_cost(start, 0.7, 4)
    filled = filled_buckets([4 * n for n in gradients.numels], bucket_bytes)
    assert plan_buckets(gradients, cost).finish_ns <= finish_ns(gradients, filled, cost)


def test_times_by_hand() -> None:
    """Ready at 0, 10, 20, 100 elements each 1 ns, start 30 ns.

    Alone the first leaves at 0 and arrives at 130; the other two together at 130 + 30 + 200.
    All in one: 20 + 30 + 300 = 350. So one bucket wins; without a start each for itself does.
    """
    gradients = Gradients(ready_ns=(0, 10, 20), numels=(100, 100, 100))
    dear, free = affine_cost(30, 1, 1), affine_cost(0, 1, 1)
    assert arrivals_ns(gradients, (1, 2), dear) == (130, 360)
    assert arrivals_ns(gradients, (3,), dear) == (350,)
    plan = plan_buckets(gradients, dear)
    assert (plan.sizes, plan.finish_ns) == ((3,), 350)
    assert plan_buckets(gradients, free).finish_ns == 300


@pytest.mark.parametrize(
    ("start", "slope", "expected"),
    [(0, 0, 500), (7, 0, 507)],
    ids=["a free link ends with the last gradient", "and one that costs its start, that later"],
)
def test_closed_forms(start: int, slope: int, expected: int) -> None:
    gradients = Gradients(ready_ns=(100, 200, 300, 400, 500), numels=(9, 8, 7, 6, 5))
    assert plan_buckets(gradients, affine_cost(start, slope, 4)).finish_ns == expected


def test_all_ready_at_once_is_one_bucket() -> None:
    gradients = Gradients(ready_ns=(5, 5, 5, 5), numels=(1, 2, 3, 4))
    assert plan_buckets(gradients, affine_cost(10, 1, 1)).sizes == (4,)


def test_a_gradient_that_comes_out_of_order_holds_up_its_bucket() -> None:
    gradients = Gradients(ready_ns=(50, 10, 60), numels=(1, 1, 1))
    assert gradients.complete_ns == (50, 50, 60)
    assert arrivals_ns(gradients, (2, 1), affine_cost(0, 1, 1)) == (52, 61)


def test_filled_buckets_are_those_of_torch() -> None:
    """[3, 5, 2, 9, 1] bytes filled to 8: 3+5 is full, 2+9 is full, 1 is left."""
    assert filled_buckets([3, 5, 2, 9, 1], 8) == (2, 2, 1)
    assert filled_buckets([3, 5], 8) == (2,)


def test_a_plan_of_a_thousand_gradients_arrives_when_it_says() -> None:
    random = np.random.default_rng(1)
    numels = tuple(random.integers(1, 10**7, 1000).tolist())
    gradients = Gradients(ready_ns=tuple(accumulate([10**6] * 1000)), numels=numels)
    cost: Cost = affine_cost(50_000, 0.04, 4)
    plan = plan_buckets(gradients, cost)
    assert finish_ns(gradients, plan.sizes, cost) == plan.finish_ns
    assert sum(plan.sizes) == 1000


@pytest.mark.parametrize(
    ("sizes", "said"),
    [((2, 0, 2), "at least one gradient"), ((2, 1), "hold the 4 trained parameters once each")],
)
def test_buckets_that_hold_not_each_gradient_once_are_told(
    sizes: tuple[int, ...], said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        check_sizes(sizes, 4)


def test_sizes_and_times_belong_together() -> None:
    with pytest.raises(PlanError, match="1 and 2"):
        Gradients(ready_ns=(1,), numels=(1, 2))
