from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.profiles.calibration import Calibration
from claw_plan.profiles.cost import FITTED, INTERPOLATED

TIMES = st.floats(1.0, 1e12)


def test_passes_through_rising_points() -> None:
    calibration = Calibration([(100, 300), (1000, 2000), (10_000, 50_000)])
    for x, y in ((100, 300), (1000, 2000), (10_000, 50_000)):
        ns, source = calibration(x)
        assert ns == pytest.approx(y)
        assert source == INTERPOLATED


def test_interpolates_in_log_log() -> None:
    # Half way between 100 and 10000 on a log scale is 1000; between 1 and 100, 10.
    assert Calibration([(100, 1), (10_000, 100)])(1000) == (pytest.approx(10), INTERPOLATED)


def test_keeps_the_outermost_ratio_and_says_so() -> None:
    calibration = Calibration([(100, 300), (1000, 2000)])
    assert calibration(10) == (pytest.approx(30), FITTED)
    assert calibration(5000) == (pytest.approx(10_000), FITTED)


def test_falling_neighbours_share_their_geometric_mean() -> None:
    calibration = Calibration([(10, 400), (100, 100), (1000, 5000)])
    assert calibration(10)[0] == pytest.approx(200)
    assert calibration(100)[0] == pytest.approx(200)
    assert calibration(1000)[0] == pytest.approx(5000)


def test_equal_formulas_share_their_geometric_mean() -> None:
    assert Calibration([(10, 100), (10, 400)])(10)[0] == pytest.approx(200)


def test_needs_a_point() -> None:
    with pytest.raises(ValueError, match="at least one point"):
        Calibration([])


@given(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=20), TIMES, TIMES)
def test_positive_and_never_falling(
    points: list[tuple[float, float]], first: float, second: float
) -> None:
    calibration = Calibration(points)
    low, high = sorted((first, second))
    below, above = calibration(low)[0], calibration(high)[0]
    assert 0 < below <= above * (1 + 1e-9)
    assert math.isfinite(above)
