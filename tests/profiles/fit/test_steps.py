from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.profiles.fit import NEUTRAL, PRIOR_SPREAD, StepTime, fit_constants
from claw_plan.profiles.fit.steps import SCALES

MS = 1_000_000


def step(
    measured_ms: float,
    compute_ms: float,
    other_ms: float = 0.0,
    kernels: int = 0,
    collectives: int = 0,
    traffic_ms: float = 0.0,
) -> StepTime:
    return StepTime(
        device="cpu-core",
        measured_ns=round(measured_ms * MS),
        predicted_ns=round((compute_ms + other_ms + traffic_ms) * MS),
        slopes={
            "op_scale": compute_ms * MS,
            "collective_scale": traffic_ms * MS,
            "op_overhead_ns": kernels,
            "collective_overhead_ns": collectives,
            "step_overhead_ns": 1.0,
        },
    )


def test_finds_planted_constants() -> None:
    compute = [20, 60, 150, 400, 90]
    steps = [step(1.2 * c + 5 + c / 10, c, c / 10) for c in compute]
    found = fit_constants(steps)["cpu-core"]
    assert found["op_scale"] == pytest.approx(1.2, rel=0.02)
    assert found["step_overhead_ns"] == pytest.approx(5 * MS, rel=0.1)


def test_finds_the_host_time_of_kernels_and_collectives() -> None:
    # 20 us a kernel, 500 us a collective; a step has 100 to 2000 and 0 to 60 of them.
    sizes = [(100, 500, 0), (100, 2000, 10), (50, 100, 60), (200, 1000, 0), (80, 1500, 40)]
    steps = [step(c + k * 0.02 + x * 0.5, c, 0.0, k, x) for c, k, x in sizes]
    found = fit_constants(steps)["cpu-core"]
    assert found["op_overhead_ns"] == pytest.approx(20_000, rel=0.1)
    assert found["collective_overhead_ns"] == pytest.approx(500_000, rel=0.1)
    assert found["op_scale"] == pytest.approx(1.0, abs=0.03)


def test_long_traffic_does_not_make_kernels_slow() -> None:
    # Two steps, mostly of traffic that takes 8 % longer than alone, and one without any.
    steps = [step(c + 1.08 * t, c, traffic_ms=t) for c, t in ((90, 770), (190, 1050), (300, 0))]
    found = fit_constants(steps)["cpu-core"]
    assert found["op_scale"] == pytest.approx(1.0, abs=0.02)
    assert found["collective_scale"] == pytest.approx(1.08, abs=0.02)
    # Without the third the two cannot be told apart, and most is the traffic's by its share.
    found = fit_constants(steps[:2])["cpu-core"]
    assert found["collective_scale"] > 1.04
    assert found["op_scale"] < 1.08


def test_perfect_predictions_need_no_correction() -> None:
    found = fit_constants([step(110, 100, 10, 50, 5), step(220, 200, 20, 90, 9)])["cpu-core"]
    assert found == pytest.approx(NEUTRAL, abs=1e-6)
    assert set(NEUTRAL) == set(PRIOR_SPREAD)


def test_one_disturbed_run_hardly_matters() -> None:
    steps = [step(1.1 * c, c) for c in (50, 100, 150, 200, 250)]
    found = fit_constants([*steps, step(3 * 100, 100)])["cpu-core"]
    assert found["op_scale"] == pytest.approx(1.1, rel=0.05)


def test_overheads_are_never_negative() -> None:
    found = fit_constants([step(50, 100, 0, 900, 9), step(400, 410, 0, 90, 9)])["cpu-core"]
    assert found["step_overhead_ns"] == 0.0
    assert found["op_overhead_ns"] == 0.0
    assert found["op_scale"] < 1.0


def test_one_step_is_explained_by_the_constants_together() -> None:
    found = fit_constants([step(130, 100)])["cpu-core"]
    explained = found["op_scale"] * 100 * MS + found["step_overhead_ns"]
    assert explained == pytest.approx(130 * MS, rel=0.02)


def test_devices_are_apart() -> None:
    other = StepTime(device="h100", measured_ns=100, predicted_ns=50, slopes={"op_scale": 50})
    assert set(fit_constants([step(10, 10), other])) == {"cpu-core", "h100"}
    assert fit_constants([]) == {}


def test_a_step_took_time() -> None:
    with pytest.raises(ValueError, match="not a step"):
        step(0, 10)


@given(
    st.lists(
        st.tuples(
            st.floats(1, 1e4),
            st.floats(1, 1e4),
            st.floats(0, 1e4),
            st.integers(0, 10**6),
            st.integers(0, 10**4),
        ),
        min_size=1,
    )
)
def test_constants_stay_within_reason(rows: list[tuple[float, float, float, int, int]]) -> None:
    found = fit_constants([step(*row) for row in rows])["cpu-core"]
    assert all(0.3 <= found[name] <= 3.0 for name in SCALES)
    assert all(0.0 <= found[name] < 1e12 for name in NEUTRAL.keys() - SCALES)
