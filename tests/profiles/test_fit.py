from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.profiles.fit import StepTime, fit_constants

MS = 1_000_000


def step(measured_ms: float, compute_ms: float, other_ms: float = 0.0) -> StepTime:
    return StepTime(
        device="cpu-core",
        measured_ns=round(measured_ms * MS),
        compute_ns=round(compute_ms * MS),
        other_ns=round(other_ms * MS),
    )


def test_finds_planted_constants() -> None:
    compute = [20, 60, 150, 400, 90]
    steps = [step(1.2 * c + 5 + c / 10, c, c / 10) for c in compute]
    found = fit_constants(steps)["cpu-core"]
    assert found["op_scale"] == pytest.approx(1.2, rel=0.02)
    assert found["step_overhead_ns"] == pytest.approx(5 * MS, rel=0.1)


def test_perfect_predictions_need_no_correction() -> None:
    found = fit_constants([step(110, 100, 10), step(220, 200, 20)])["cpu-core"]
    assert found["op_scale"] == pytest.approx(1.0, abs=1e-6)
    assert found["step_overhead_ns"] == pytest.approx(0.0, abs=1.0)


def test_one_disturbed_run_hardly_matters() -> None:
    steps = [step(1.1 * c, c) for c in (50, 100, 150, 200, 250)]
    found = fit_constants([*steps, step(3 * 100, 100)])["cpu-core"]
    assert found["op_scale"] == pytest.approx(1.1, rel=0.05)


def test_an_overhead_is_never_negative() -> None:
    found = fit_constants([step(50, 100), step(400, 410)])["cpu-core"]
    assert found["step_overhead_ns"] == 0.0
    assert found["op_scale"] < 1.0


def test_one_step_is_explained_by_both_constants_together() -> None:
    found = fit_constants([step(130, 100)])["cpu-core"]
    explained = found["op_scale"] * 100 * MS + found["step_overhead_ns"]
    assert explained == pytest.approx(130 * MS, rel=0.02)


def test_devices_are_apart() -> None:
    other = StepTime(device="h100", measured_ns=100, compute_ns=50, other_ns=0)
    assert set(fit_constants([step(10, 10), other])) == {"cpu-core", "h100"}
    assert fit_constants([]) == {}


def test_a_step_took_time() -> None:
    with pytest.raises(ValueError, match="not a step"):
        step(0, 10)


@given(st.lists(st.tuples(st.floats(1, 1e4), st.floats(1, 1e4), st.floats(0, 1e4)), min_size=1))
def test_constants_stay_within_reason(rows: list[tuple[float, float, float]]) -> None:
    found = fit_constants([step(*row) for row in rows])["cpu-core"]
    assert 0.3 <= found["op_scale"] <= 3.0
    assert 0.0 <= found["step_overhead_ns"] < 1e12
