from __future__ import annotations

import json

import pytest

from claw_plan.profiles import catalogue
from claw_plan.profiles.kernel_tables import (
    FOLDER,
    GENERATION,
    OTHER,
    OWN,
    TIMED_TABLES,
    attention_shape_of,
    gemm_shape_of,
    gemm_shapes,
    measured_ratio,
    measured_s,
    table_seconds,
)


@pytest.mark.parametrize(
    ("device", "dtype", "table", "origin"),
    [
        ("h100-sxm-80gb", "bfloat16", "h100-sxm-80gb/bfloat16/xla", OWN),
        ("h200-sxm-141gb", "float16", "h100-sxm-80gb/bfloat16/xla", GENERATION),
        ("gb200-186gb", "float8", "b200-sxm-180gb/float8/xla", GENERATION),
        ("b200-sxm-180gb", "bfloat16", "b200-sxm-180gb/bfloat16/simumax", OWN),
        ("a100-sxm-40gb", "bfloat16", "a100-pcie-80gb/bfloat16/simumax", GENERATION),
        ("a100-pcie-40gb", "float32", "a100-pcie-40gb/float32/neusight", OWN),
        ("a100-pcie-40gb", "bfloat16", "a100-pcie-80gb/bfloat16/simumax", GENERATION),
        ("t4", "float32", "t4/float32/neusight", OWN),
        ("t4", "float16", "average/bfloat16", OTHER),
        ("mi300x", "float32", "average/float32", OTHER),
    ],
)
def test_the_nearest_table_serves(device: str, dtype: str, table: str, origin: str) -> None:
    chosen = gemm_shape_of(device, dtype)
    assert (chosen.shape.table, chosen.origin) == (table, origin)


def test_narrow_dtypes_without_a_table_take_the_wider_shape() -> None:
    assert gemm_shape_of("h100-sxm-80gb", "float8").dtype == "bfloat16"
    assert gemm_shape_of("b200-sxm-180gb", "float4").dtype == "float8"
    assert gemm_shape_of("mi300x", "float8").dtype == "bfloat16"
    assert gemm_shape_of("b200-sxm-180gb", "float64").dtype == "float32"


@pytest.mark.parametrize("name", sorted(catalogue.catalogue().devices))
def test_every_device_has_shapes(name: str) -> None:
    for dtype in ("float16", "bfloat16", "float8", "float4", "float32", "float64"):
        shape = gemm_shape_of(name, dtype).shape
        assert 0 < shape.partial_wave < 1
        assert shape.flops_per_s > 1e12
    assert attention_shape_of(name)[0].forward > attention_shape_of(name)[0].backward


def test_of_a_table_that_mixes_sessions_only_the_constants_count() -> None:
    name = "b200-sxm-180gb/bfloat16/simumax"
    chosen = gemm_shape_of("b200-sxm-180gb", "bfloat16").shape
    assert chosen.ramp == gemm_shapes()[name].ramp
    assert chosen.residual(17.0, 12.0) == 0.0 != gemm_shapes()[name].residual(17.0, 12.0)
    # SimuMax has 1456 TFLOP/s for 4096 x 4096 x 2048, above what any large product reaches.
    assert measured_s(name, (1, 4096, 4096, 2048), 0) is None


def test_measured_times_are_those_of_the_tables() -> None:
    # XLA's table has 780 TFLOP/s for 4096 x 4096 x 4096 on H100, in its first run.
    seconds = measured_s("h100-sxm-80gb/bfloat16/xla", (1, 4096, 4096, 4096), 0)
    assert seconds == pytest.approx(2 * 4096**3 / 780.1e12, rel=1e-3)
    # 2048 x 512 is there with 4096 deep, and its transpose means the same.
    table = "h100-sxm-80gb/bfloat16/xla"
    there = measured_s(table, (1, 2048, 512, 4096), 0)
    assert measured_s(table, (1, 512, 2048, 4096), 0) == there is not None
    assert measured_s(table, (1, 4097, 4096, 4096), 0) is None
    assert measured_s("average/bfloat16", (1, 4096, 4096, 4096), 0) is None


def test_a_measured_ratio_leads_from_the_shape_to_the_measurement() -> None:
    name, dims = "h100-sxm-80gb/bfloat16/xla", (1, 4096, 4096, 4096)
    shape = gemm_shapes()[name]
    ratio = measured_ratio(shape, dims, 0.0)
    assert ratio is not None
    assert ratio * table_seconds(shape, dims) == pytest.approx(measured_s(name, dims, 0.0))
    assert ratio == pytest.approx(1, abs=0.1)
    assert measured_ratio(shape, (1, 4097, 4096, 4096), 0.0) is None


def test_products_left_out_of_the_fit_are_met() -> None:
    tables = json.loads((FOLDER / "gemm_shapes.json").read_text(encoding="utf-8"))["tables"]
    for name in TIMED_TABLES:
        assert tables[name]["left_out"]["median_pct"] < 6.5, name
    good = [t["left_out"] for t in tables.values() if t["left_out"]["median_pct"] <= 6]
    assert sum(t["rows"] for t in good) > 6000
