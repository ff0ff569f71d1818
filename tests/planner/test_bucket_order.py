"""Orders of buckets against all orders, and against a chain of updates and blocks played out."""

from __future__ import annotations

from itertools import permutations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.planner.bucket_order import (
    WORTH,
    NextStep,
    OrderedBuckets,
    forward_end_ns,
    order_buckets,
    ordered_buckets,
)
from claw_plan.planner.bucket_plan import Gradients, Int, finish_ns, plan_buckets


def played(
    gradients: Gradients, following: NextStep, sizes: tuple[int, ...], order: tuple[int, ...]
) -> int:
    """One link and one processor, event by event; a bucket costs 3 and its elements."""
    begins = [sum(sizes[:number]) for number in range(len(sizes))]
    members = [range(b, b + size) for b, size in zip(begins, sizes, strict=True)]
    arrived, now = {}, 0
    for number in order:
        now = max(now, *(gradients.ready_ns[i] for i in members[number]))
        now += 3 + sum(gradients.numels[i] for i in members[number])
        arrived[number] = now
    clock, position = max(gradients.ready_ns), 0
    needed = {number: min(following.needed_ns[i] for i in members[number]) for number in arrived}
    for number in sorted(arrived, key=lambda one: (needed[one], one)):
        clock += needed[number] - position  # the blocks up to where it is needed
        position = needed[number]
        clock = max(clock, arrived[number])
        clock += sum(following.update_ns[i] for i in members[number])
    return clock + following.forward_ns - position


def cost(elements: Int) -> Int:
    return 3 + elements


@st.composite
def steps(draw: st.DrawFn) -> tuple[Gradients, NextStep, tuple[int, ...]]:
    sizes = tuple(draw(st.lists(st.integers(1, 2), min_size=1, max_size=6)))
    count = sum(sizes)
    times = st.lists(st.integers(0, 60), min_size=count, max_size=count)
    numels = draw(st.lists(st.integers(1, 20), min_size=count, max_size=count))
    gradients = Gradients(ready_ns=tuple(draw(times)), numels=tuple(numels))
    updates = draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    following = NextStep(
        needed_ns=tuple(draw(times)),
        update_ns=tuple(updates),
        forward_ns=draw(st.integers(60, 99)),
    )
    return gradients, following, sizes


@given(steps())
@settings(deadline=None)
def test_the_order_is_the_best_of_all(case: tuple[Gradients, NextStep, tuple[int, ...]]) -> None:
    gradients, following, sizes = case
    found = order_buckets(gradients, following, sizes, cost)
    every = permutations(range(len(sizes)))
    assert found.finish_ns == min(played(gradients, following, sizes, order) for order in every)
    assert found.finish_ns == played(gradients, following, sizes, found.order)
    assert found.finish_ns == forward_end_ns(gradients, following, found, cost)


@given(steps())
@settings(deadline=None)
def test_never_later_than_waiting_for_all(
    case: tuple[Gradients, NextStep, tuple[int, ...]],
) -> None:
    gradients, following, sizes = case
    waited = finish_ns(gradients, sizes, cost) + following.alone_ns
    assert order_buckets(gradients, following, sizes, cost).finish_ns <= waited


def test_the_first_block_overtakes_those_that_wait() -> None:
    """Three buckets, ready at 10, 20, 30; each travels 100. The forward needs the last first.

    The rule of P3 would send the first at 10, and end at 350.
    """
    gradients = Gradients(ready_ns=(10, 20, 30), numels=(97, 97, 97))
    following = NextStep(needed_ns=(40, 20, 0), update_ns=(0, 0, 0), forward_ns=60)
    found = order_buckets(gradients, following, (1, 1, 1), cost)
    assert found == OrderedBuckets(sizes=(1, 1, 1), order=(1, 2, 0), finish_ns=340)
    # Sent as they come: the last arrives at 310, and then the whole forward.
    in_turn = OrderedBuckets(sizes=(1, 1, 1), order=(0, 1, 2), finish_ns=0)
    assert forward_end_ns(gradients, following, in_turn, cost) == 370


def test_of_boundaries_nearly_as_good_as_the_best_the_fewest_are_taken() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        count = int(rng.integers(2, 40))
        ready = tuple(sorted(rng.integers(0, 500, count).tolist()))
        gradients = Gradients(ready_ns=ready, numels=tuple(rng.integers(1, 50, count).tolist()))
        needed = tuple(sorted(rng.integers(0, 300, count).tolist(), reverse=True))
        following = NextStep(needed_ns=needed, update_ns=(1,) * count, forward_ns=300)
        found = ordered_buckets(gradients, following, cost)
        assert sum(found.sizes) == count
        tried = [plan_buckets(gradients, cost).sizes, (count,), (1,) * count]
        others = [order_buckets(gradients, following, sizes, cost) for sizes in tried]
        for other in others:
            assert found.finish_ns <= (1 + WORTH) * other.finish_ns or len(set(needed)) < count
            if other.finish_ns <= found.finish_ns:
                assert len(found.sizes) <= len(other.sizes)
