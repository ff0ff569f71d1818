"""Statistics of errors, by hand and by brute force."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.profiles.accuracy import (
    Errors,
    Pair,
    Verdicts,
    errors_of,
    share_too_low,
    verdicts_of,
)


def pair(predicted: float, measured: float, group: str | None = None, plan: str = "") -> Pair:
    return Pair(predicted=predicted, measured=measured, group=group, plan=plan)


def test_nothing_to_count() -> None:
    assert errors_of([]) == Errors(n=0)
    assert share_too_low([]) is None


def test_errors_by_hand() -> None:
    errors = errors_of([pair(1.1, 1.0), pair(0.8, 1.0), pair(1.0, 1.0)])
    assert errors.mape == pytest.approx(10.0)
    assert errors.median == pytest.approx(10.0)
    assert errors.bias == pytest.approx(-10.0 / 3)
    assert errors.p90 == pytest.approx(18.0)
    assert (errors.pairs, errors.pairs_right_pct, errors.regret_pct) == (0, None, None)


def test_only_plans_measured_apart_are_ordered() -> None:
    group = [pair(1.0, 1.0, "g", "a"), pair(2.0, 1.04, "g", "b"), pair(0.5, 2.0, "g", "c")]
    errors = errors_of(group)
    # a and b lie within 5 %; c is slowest and predicted fastest.
    assert (errors.pairs, errors.pairs_right_pct) == (2, 0.0)
    assert errors.regret_pct == pytest.approx(100.0)
    assert errors.picks_near_best_pct == 0.0


def test_runs_of_one_plan_are_no_choice() -> None:
    errors = errors_of([pair(1.0, 1.0, "g", "a"), pair(1.0, 2.0, "g", "a")])
    assert (errors.pairs, errors.picks) == (0, 0)


def test_a_pick_near_the_best_is_as_good() -> None:
    errors = errors_of([pair(1.0, 1.01, "g", "a"), pair(1.1, 1.0, "g", "b")])
    assert errors.picks_near_best_pct == 100.0
    assert errors.regret_pct == pytest.approx(1.0)


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=12))
def test_against_the_standard_library(values: list[tuple[float, float]]) -> None:
    errors = errors_of(pair(predicted, measured) for predicted, measured in values)
    sizes = [abs(predicted / measured - 1) * 100 for predicted, measured in values]
    assert errors.mape == pytest.approx(statistics.fmean(sizes))
    assert errors.median == pytest.approx(statistics.median(sizes))


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=8))
def test_a_perfect_prediction_orders_all_and_regrets_nothing(times: list[float]) -> None:
    pairs = [pair(time, time, "g", str(index)) for index, time in enumerate(times)]
    errors = errors_of(pairs)
    assert errors.pairs_right_pct in (None, 100.0)
    assert errors.regret_pct == 0.0


def test_memory_too_low_is_counted() -> None:
    assert share_too_low([pair(0.94, 1.0), pair(0.96, 1.0), pair(1.5, 1.0)]) == pytest.approx(
        100 / 3
    )


def test_verdicts() -> None:
    runs = [(True, True), (True, False), (False, True), (False, False)]
    assert verdicts_of(runs) == Verdicts(out_of_memory=2, told=1, ran=2, false_alarms=1)
