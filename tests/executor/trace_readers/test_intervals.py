from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.executor.trace_readers.intervals import (
    NONE,
    Intervals,
    clip,
    flatten,
    inside,
    intervals,
    overlap_ns,
    subtract,
    union,
)

PAIRS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted).map(tuple))


def covered(pairs: list[tuple[int, int]]) -> set[int]:
    return {time for start, end in pairs for time in range(start, end)}


def of(pairs: list[tuple[int, int]]) -> Intervals:
    return union(*intervals(pairs))


def times(some: Intervals) -> set[int]:
    return covered(list(zip(some.start.tolist(), some.end.tolist(), strict=True)))


@given(PAIRS, PAIRS)
def test_sets_of_instants_say_the_same(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    a, b = of(first), of(second)
    assert times(a) == covered(first)
    assert a.length == len(covered(first))
    assert times(subtract(a, b)) == covered(first) - covered(second)
    assert overlap_ns(a, b) == len(covered(first) & covered(second))
    assert times(clip(a, 5, 20)) == covered(first) & set(range(5, 20))
    assert [int(t) for t in np.arange(41)[inside(np.arange(41), a)]] == sorted(covered(first))
    assert (a.start[1:] > a.end[:-1]).all()


def test_nothing_is_nothing() -> None:
    assert not NONE and of([(3, 3)]).length == 0
    assert not inside(np.array([1]), NONE).any()


def test_each_instant_belongs_to_the_innermost_call() -> None:
    # outer 0..10 calls a 2..4 and b 4..8, which calls c 5..6
    start, end = np.array([5, 0, 4, 2]), np.array([6, 10, 8, 4])
    rows = list(
        zip(*(column.tolist() for column in flatten(start, end, np.arange(4))), strict=True)
    )
    assert rows == [
        (0, 2, 1, 1), (2, 4, 3, 1), (4, 5, 2, 1), (5, 6, 0, 1), (6, 8, 2, 1), (8, 10, 1, 1),
    ]  # fmt: skip


@given(PAIRS)
def test_flattening_covers_the_union_once(pairs: list[tuple[int, int]]) -> None:
    start, end = intervals(pairs)
    flat_start, flat_end, _, _ = flatten(start, end, np.arange(len(start)))
    assert int((flat_end - flat_start).sum()) <= of(pairs).length
    assert (flat_start[1:] >= flat_end[:-1]).all()


def test_a_call_that_outlives_its_caller_ends_with_it() -> None:
    start, end, label, _ = flatten(np.array([0, 5]), np.array([10, 15]), np.array([0, 1]))
    assert (start.tolist(), end.tolist(), label.tolist()) == ([0, 5], [5, 10], [0, 1])
