from __future__ import annotations

from typing import Any

import pytest

from claw_plan.profiles.fit.kernel_rows import TableKey, gemm_tables

XLA = {"gpu": "H100 (sm_90)", "batch": 2, "m": 256, "n": 512, "k": 1024}


def tables(**rows: list[dict[str, Any]]) -> dict[TableKey, Any]:
    return gemm_tables({name: {"rows": some} for name, some in rows.items()})


def test_a_shape_named_twice_is_two_runs() -> None:
    row = XLA | {"dtype": "bf16xbf16->bf16", "tflops": 100.0}
    other = XLA | {"m": 512, "dtype": "bf16xbf16->bf16", "tflops": 100.0}
    found = tables(xla_matmul_table=[row, row | {"tflops": 50.0}, other])
    first = found[TableKey("h100-sxm-80gb", "bfloat16", "xla")]
    second = found[TableKey("h100-sxm-80gb", "bfloat16", "xla-2")]
    assert [r.seconds for r in first] == pytest.approx(
        [2 * 2 * 256 * 512 * 1024 / 1e14, 2 * 2 * 512 * 512 * 1024 / 1e14]
    )
    assert [r.seconds for r in second] == pytest.approx([2 * 2 * 256 * 512 * 1024 / 5e13])


def test_dtypes_and_wider_results() -> None:
    found = tables(
        xla_matmul_table=[
            XLA | {"dtype": "bf16xbf16->f32", "tflops": 1.0},
            XLA | {"dtype": "f32xf32->f32", "tflops": 1.0},
            XLA | {"dtype": "f8e4m3fnxf8e5m2->bf16", "tflops": 1.0},
            XLA | {"dtype": "f8e4m3fnxf8e4m3fn->bf16", "tflops": 9.9, "flag": "above_dense_peak"},
            XLA | {"gpu": "unheard of", "dtype": "f32xf32->f32", "tflops": 1.0},
        ]
    )
    assert {(key.dtype, len(rows)) for key, rows in found.items()} == {
        ("bfloat16-float32", 1), ("tfloat32", 1), ("float8", 1),
    }  # fmt: skip
    wide = found[TableKey("h100-sxm-80gb", "bfloat16-float32", "xla")]
    assert wide[0].extra_bytes == 2 * 2 * 256 * 512


@pytest.mark.parametrize(
    ("accumulate", "out", "extra"),
    [(False, "bf16", 0), (True, "bf16", 2), (True, "fp32", 6), (False, "fp32", 2)],
)
def test_accumulation_moves_the_result_more_than_once(
    accumulate: bool, out: str, extra: int
) -> None:
    row = {
        "gpu": "B200", "op": "matmul", "batch": 1, "m": 10, "n": 20, "k": 30, "layout": "NT",
        "accumulate": accumulate, "out_dtype": out, "dtype": "bf16", "tflops": 1.0,
    }  # fmt: skip
    found = tables(simumax_efficiency=[row, row | {"op": "sdp_fwd"}])
    (rows,) = found.values()
    assert [r.extra_bytes for r in rows] == [extra * 10 * 20]


def test_linear_layers_are_read_by_their_time() -> None:
    row = {"gpu": "T4", "batch": 1, "m": 8, "n": 16, "k": 32, "dtype": "fp32", "time_ms": 2.5,
           "tflops": 1.0}  # fmt: skip
    found = tables(neusight_linear_fp32=[row])
    assert found[TableKey("t4", "float32", "neusight")][0].seconds == pytest.approx(2.5e-3)
