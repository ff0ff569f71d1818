from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.profiles.gemm_cost import GemmShape, Residual, factor_bytes, operand_bytes
from claw_plan.profiles.kernel_tables import gemm_shapes

PLAIN = GemmShape(
    table="hand",
    flops_per_s=100e12,
    ramp=128,
    partial_wave=0.6,
    square=0.95,
    narrow=0.82,
    small=0.6,
)


def seconds(shape: GemmShape, *dims: int, bandwidth: float = 1e30, extra: float = 0.0) -> float:
    batch, m, n, k = dims
    return shape.time(
        108,
        (batch, m, n, k),
        memory_bytes_per_s=bandwidth,
        operand_bytes=operand_bytes(2, batch, m, n, k),
        extra_bytes=extra,
    ).seconds


def test_a_whole_wave_of_the_largest_tiles_costs_nothing_extra() -> None:
    # 108 processors take 108 tiles of 256 x 128: 27 * 256 rows, 4 * 128 columns.
    m, n, k = 27 * 256, 4 * 128, 4096
    bare = 2 * m * n * k / 100e12
    assert seconds(PLAIN, 1, m, n, k) == pytest.approx(bare * (1 + 128 / k))
    # Batches are further tiles.
    assert seconds(PLAIN, 4, m, n, k) == pytest.approx(4 * bare * (1 + 128 / k))


def test_one_tile_more_pays_most_of_a_wave() -> None:
    # 28 * 4 = 112 tiles: .6 * 216 + .4 * 112 = 174.4 tiles are paid, unless smaller tiles fit.
    m, n, k = 28 * 256, 4 * 128, 4096
    bare = 2 * m * n * k / 100e12 * (1 + 128 / k)
    largest = 174.4 / 112
    # 128 x 64: 56 * 8 = 448 tiles, 5 waves: .6 * 540 + .4 * 448 = 503.2, at .82 efficiency.
    medium = 503.2 / 448 / 0.82
    # 128 x 128: 56 * 4 = 224 tiles, 3 waves: .6 * 324 + .4 * 224 = 284, at .95.
    square = 284 / 224 / 0.95
    assert seconds(PLAIN, 1, m, n, k) == pytest.approx(bare * min(largest, medium, square))


def test_bytes_bound_a_thin_product_and_only_compute_follows_the_rate() -> None:
    dims = (1, 8, 4096, 4096)
    device = {"memory_bytes_per_s": 1e12, "operand_bytes": operand_bytes(2, *dims)}
    slow = PLAIN.time(108, dims, **device)
    fast = PLAIN.time(108, dims, flops_per_s=1e30, **device)
    assert fast.compute_share == pytest.approx(0, abs=1e-9)
    assert fast.seconds == pytest.approx(operand_bytes(2, *dims) / 0.85e12)
    assert slow.seconds > fast.seconds


def test_the_share_of_compute_is_the_derivative_by_the_rate() -> None:
    dims = (1, 700, 900, 300)
    device = {"memory_bytes_per_s": 1e12, "operand_bytes": operand_bytes(2, *dims)}
    here = PLAIN.time(108, dims, flops_per_s=100e12, extra_bytes=1e6, **device)
    step = 1e-6
    there = PLAIN.time(108, dims, flops_per_s=100e12 * (1 + step), extra_bytes=1e6, **device)
    slope = math.log(there.seconds / here.seconds) / step
    assert 0.1 < here.compute_share < 0.99
    assert slope == pytest.approx(-here.compute_share, rel=1e-3)


def test_accumulated_results_are_moved_besides() -> None:
    m = n = k = 4096
    extra = 6 * m * n
    more = seconds(PLAIN, 1, m, n, k, bandwidth=2e12, extra=extra) - seconds(
        PLAIN, 1, m, n, k, bandwidth=2e12
    )
    assert more == pytest.approx(extra / 2e12)


def test_a_residual_is_bilinear_and_constant_outside() -> None:
    grid = Residual(x0=10, y0=7, rows=((0.0, 0.2), (0.4, 1.0)))
    assert grid(10, 7) == 0.0
    assert grid(11, 8) == 1.0
    assert grid(10.5, 7.5) == pytest.approx((0.0 + 0.2 + 0.4 + 1.0) / 4)
    assert grid(10.25, 7) == pytest.approx(0.1)
    assert grid(-3, 99) == pytest.approx(0.2)
    assert grid(99, 7.5) == pytest.approx(0.7)
    shape = replace(PLAIN, residual=Residual(rows=((math.log(2),),)))
    assert seconds(shape, 1, 512, 512, 512) == pytest.approx(2 * seconds(PLAIN, 1, 512, 512, 512))


def test_distance_beyond_the_measured_shapes_is_in_octaves() -> None:
    shape = replace(PLAIN, domain=(10.0, 20.0, 8.0, 12.0))
    time = shape.time(1, (1, 256, 128, 4 * 4096), memory_bytes_per_s=1e30, operand_bytes=0)
    # 256 * 128 = 2^15 lies inside, 2^14 two octaves above 2^12.
    assert time.beyond == pytest.approx(2)


def test_narrow_factors_give_wide_results() -> None:
    assert operand_bytes(factor_bytes("float8"), 1, 10, 20, 30) == 10 * 30 + 30 * 20 + 2 * 10 * 20
    assert operand_bytes(factor_bytes("float4"), 1, 10, 20, 30) == 450 + 400
    assert operand_bytes(factor_bytes("float32"), 2, 10, 20, 30) == 2 * 4 * (300 + 600 + 200)


SIZES = st.integers(1, 40_000)


@given(
    st.sampled_from(sorted(gemm_shapes())),
    SIZES,
    SIZES,
    SIZES,
    st.integers(1, 64),
    st.integers(1, 5000),
    st.sampled_from([0, 1, 2, 3]),
)
def test_no_product_gets_cheaper_by_growing(
    table: str, m: int, n: int, k: int, batch: int, more: int, grown: int
) -> None:
    shape = gemm_shapes()[table]
    small = [batch, m, n, k]
    large = [size + (more if index == grown else 0) for index, size in enumerate(small)]
    before = seconds(shape, *small, bandwidth=2e12)
    assert 0 < before <= seconds(shape, *large, bandwidth=2e12) * (1 + 1e-9)
