from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.executor.benchmark_gloo import GLOO_OPS, fit_line, measure_gloo
from claw_plan.profiles.work import COLLECTIVE_OPS


@given(st.floats(1e3, 1e7), st.floats(1e6, 1e11))
def test_finds_a_planted_line(start_ns: float, bytes_per_s: float) -> None:
    sizes = [2**exponent for exponent in (10, 14, 18, 22, 24)]
    points = [(float(size), start_ns + size * 1e9 / bytes_per_s) for size in sizes]
    start, rate = fit_line(points)
    assert start + sizes[0] * 1e9 / rate == pytest.approx(points[0][1], rel=1e-3)
    assert start + sizes[-1] * 1e9 / rate == pytest.approx(points[-1][1], rel=1e-3)


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(1, 1e12)), min_size=1, max_size=8))
def test_noise_never_gives_a_negative_start_or_rate(points: list[tuple[float, float]]) -> None:
    start, rate = fit_line(points)
    assert start > 0
    assert rate > 0


def test_all_collectives_are_measured() -> None:
    assert set(GLOO_OPS) == set(COLLECTIVE_OPS)


@pytest.mark.slow
def test_two_processes_answer() -> None:
    samples = measure_gloo(sizes_bytes=(1 << 10, 1 << 16), repeats=5)
    assert len(samples) == 2 * len(GLOO_OPS)
    for work, times in samples.items():
        assert (work.group_size, work.backend) == (2, "gloo")
        assert len(times) == 5
        assert min(times) > 0
