from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest

from claw_plan.profiles import catalogue
from claw_plan.profiles.fit.gemm import GemmRow, fit_shape, fold_of_shapes
from claw_plan.profiles.gemm_cost import GemmShape, operand_bytes

DEVICE = catalogue.device("a100-sxm-80gb")
TRUTH = GemmShape(
    table="planted",
    flops_per_s=250e12,
    ramp=200,
    partial_wave=0.5,
    square=0.93,
    narrow=0.8,
    small=0.6,
    overhead_s=4e-6,
    memory_share=0.9,
)
SIZES = (256, 640, 1000, 2048, 4096, 6000)


def seconds(shape: GemmShape, dims: tuple[int, int, int, int]) -> float:
    return (
        shape.overhead_s
        + shape.time(
            DEVICE.processors,
            dims,
            memory_bytes_per_s=DEVICE.memory_bytes_per_s,
            operand_bytes=operand_bytes(2, *dims),
        ).seconds
    )


def planted(bump: float = 0.0) -> list[GemmRow]:
    """Exact rows of `TRUTH`, those deeper than 2048 longer by `bump`."""
    rows = []
    for m, n, k in product(SIZES, SIZES, SIZES):
        factor = 1 + (bump if k > 2048 else 0.0)
        rows.append(GemmRow(dims=(1, m, n, k), seconds=factor * seconds(TRUTH, (1, m, n, k))))
    return rows


def test_planted_constants_are_found() -> None:
    shape, left_out = fit_shape(planted(), DEVICE, 2, table="t", source="s")
    assert shape.flops_per_s == pytest.approx(250e12, rel=0.02)
    assert shape.overhead_s == pytest.approx(4e-6, rel=0.1)
    assert shape.partial_wave == pytest.approx(0.5, abs=0.05)
    assert left_out.median < 0.01
    assert shape.spread == pytest.approx(left_out.two_thirds, rel=1e-3)


def test_what_the_form_does_not_know_the_residual_learns() -> None:
    rows = planted(bump=0.2)
    shape, left_out = fit_shape(rows, DEVICE, 2, table="t", source="s")
    errors = [abs(seconds(shape, row.dims) / row.seconds - 1) for row in rows]
    assert sum(errors) / len(errors) < 0.03
    bare = replace(shape, residual=type(shape.residual)())
    worse = [abs(seconds(bare, row.dims) / row.seconds - 1) for row in rows]
    assert sum(worse) > sum(errors)
    assert 0 < left_out.median < left_out.mape


def test_the_residual_never_outweighs_growth() -> None:
    # Deep products a hundredth of the time: the fit may follow only so far as time still grows.
    rows = [replace(row, seconds=row.seconds * (0.01 if row.dims[3] > 4096 else 1.0))
            for row in planted()]  # fmt: skip
    shape, _ = fit_shape(rows, DEVICE, 2, table="t", source="s")
    times = [seconds(shape, (1, 4096, 4096, 2 ** (i / 4))) for i in range(24, 64)]  # type: ignore[arg-type]
    assert times == sorted(times)


def test_rows_of_one_shape_are_left_out_together() -> None:
    rows = planted() + planted()
    folds = fold_of_shapes(rows)
    half = len(rows) // 2
    assert list(folds[:half]) == list(folds[half:])
    assert set(folds) == set(range(5))
    assert math.isclose(sum(folds == 0), len(rows) / 5, rel_tol=0.05)
