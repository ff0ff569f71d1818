from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.planner.allocator import (
    OUTSIDE_BYTES,
    RESERVED_RATIO,
    Shown,
    needed,
    shown,
    shown_by_host,
)

GB = 10**9


def test_each_kind_shows_more_than_the_one_before():
    assert shown(10 * GB, "allocated").expected_bytes == 10 * GB
    reserved = shown(10 * GB, "reserved").expected_bytes
    assert reserved == round(10 * GB * RESERVED_RATIO)
    assert shown(10 * GB).expected_bytes == reserved + OUTSIDE_BYTES
    assert reserved < needed(10 * GB).expected_bytes < shown(10 * GB).expected_bytes


@pytest.mark.parametrize("limit", [0.6, 0.9, 1.0, 1.2])
def test_probabilities_are_those_of_a_normal_distribution(limit):
    import math

    value = Shown(expected_bytes=GB, spread=0.1)
    normal = statistics.NormalDist(0.0, 0.1)
    expected = 1.0 - normal.cdf(math.log(limit))
    assert value.probability_above(round(limit * GB)) == pytest.approx(expected, abs=1e-6)


def test_the_interval_leaves_a_tenth_on_either_side():
    value = shown(40 * GB)
    low, high = value.interval_bytes
    assert low < value.expected_bytes < high
    assert value.probability_above(low) == pytest.approx(0.9, abs=1e-3)
    assert value.probability_above(high) == pytest.approx(0.1, abs=1e-3)


@given(st.integers(1, 200 * GB), st.integers(1, 200 * GB))
def test_more_tensors_never_make_it_safer(one, more):
    limit = 80 * GB
    less, greater = needed(one), needed(one + more)
    assert less.probability_above(limit) <= greater.probability_above(limit)


def test_nothing_fits_in_nothing():
    assert shown(GB).probability_above(0) == 1.0
    assert Shown(expected_bytes=0, spread=0.1).probability_above(0) == 0.0


def test_a_host_s_process_holds_more_than_its_tensors():
    assert shown_by_host(GB).expected_bytes > GB
