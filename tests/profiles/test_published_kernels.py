"""Tables of kernels; expected times and shapes from the sources' definitions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.published_fields import load_yaml
from claw_plan.profiles.published_kernels import is_kernels, read_kernels
from claw_plan.profiles.published_rows import KernelRow, Published

DATA = Path(__file__).parents[3] / "shared" / "data" / "kernels.yaml"

Write = Callable[..., Path]
GEMM = {"gpu": "B200", "batch": 2, "m": 256, "n": 512, "k": 1024, "dtype": "bf16xbf16->bf16"}


def read(write_rows: Write, *rows: dict[str, Any]) -> Published:
    path = write_rows({"somebody": {"source": "a page", "rows": list(rows)}})
    return read_kernels(path, load_yaml(path))


def one(write_rows: Write, **values: Any) -> KernelRow:
    (row,) = read(write_rows, values).kernels
    return row


def test_a_rate_becomes_a_time(write_rows: Write) -> None:
    row = one(write_rows, **GEMM, tflops=100.0)
    flops = 2 * 2 * 256 * 512 * 1024
    assert row.work.flops == flops
    assert row.measured_ns == pytest.approx(flops / 100e12 * 1e9)
    assert row.work.bytes == 2 * 2 * (256 * 1024 + 1024 * 512 + 256 * 512)
    assert (row.id, row.family, row.device_name) == (
        "somebody[0]",
        "somebody B200",
        "b200-sxm-180gb",
    )


def test_a_time_is_taken_as_it_is(write_rows: Write) -> None:
    row = one(write_rows, **GEMM | {"dtype": "fp32"}, time_ms=2.0, tflops=3.0)
    assert row.measured_ns == 2_000_000
    assert row.work.dtype == "float32"


@pytest.mark.parametrize(
    ("text", "dtype", "written"),
    [
        ("bf16xbf16->f32", "bfloat16", 4),
        ("f32xf32->f32", "tfloat32", 4),
        ("f8e4m3fnxf8e5m2->bf16", "float8", 2),
        ("fp8_e4m3", "float8", 2),
        ("fp16", "float16", 2),
        ("bf16", "bfloat16", 2),
    ],
)
def test_dtypes(write_rows: Write, text: str, dtype: str, written: int) -> None:
    row = one(write_rows, **GEMM | {"dtype": text}, tflops=1.0)
    size = {"tfloat32": 4, "float8": 1}.get(dtype, 2)
    assert row.work.dtype == dtype
    products = 2 * size * (256 * 1024 + 1024 * 512)
    assert row.work.bytes == products + 2 * written * 256 * 512


def test_accumulation_reads_and_writes_the_result(write_rows: Write) -> None:
    added = one(write_rows, **GEMM, accumulate=True, out_dtype="fp32", layout="NT", tflops=1.0)
    plain = one(write_rows, **GEMM, tflops=1.0)
    assert added.work.bytes - plain.work.bytes == 2 * 256 * 512 * (8 - 2)
    assert added.work.phase == "backward"


@pytest.mark.parametrize(
    ("stage", "dims"),
    [
        ("fwd", (40, 616, 3072, 5120)),
        ("bwd_grad_act", (40, 616, 5120, 3072)),
        ("bwd_grad_w", (40, 3072, 5120, 616)),
    ],
)
def test_grouped_products(write_rows: Write, stage: str, dims: tuple[int, ...]) -> None:
    values = {"gpu": "B200", "op": "group_matmul", "groups": 40, "m": 616, "n": 3072, "k": 5120}
    row = one(write_rows, **values, stage=stage, dtype="bf16", tflops=10.0)
    assert row.work.dims == dims
    assert row.work.flops == 2 * 40 * 616 * 3072 * 5120


def test_attention_counts_the_whole_square(write_rows: Write) -> None:
    values = {"gpu": "B200", "batch": 1, "seq_len": 4096, "head_num": 16, "kv_head_num": 2}
    sizes = {"qk_head_dim": 192, "v_head_dim": 128, "dtype": "bf16", "tflops": 500.0}
    forward = one(write_rows, op="sdp_fwd", **values, **sizes)
    backward = one(write_rows, op="sdp_bwd", **values, **sizes)
    assert forward.work.flops == 2 * 16 * 4096**2 * (192 + 128)
    assert backward.work.flops == 2.5 * forward.work.flops
    assert forward.work.dims == (1, 16, 2, 4096, 4096, 192, 1)
    assert (forward.work.phase, backward.work.phase) == ("forward", "backward")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (GEMM | {"tflops": 1.0, "flag": "above_dense_peak"}, "flagged above_dense_peak"),
        (GEMM | {"tflops": 1.0, "gpu": None}, "GPU not stated"),
        (GEMM | {"tflops": 1.0, "gpu": "Gaudi 2"}, "no figures for the GPU"),
        ({"mode": "baseline TP", "forward_ms": 7.7}, "whole layers"),
        ({"model": "gpt", "op": "qkv", "fwd_us": 1.0}, "sizes of the operator"),
        ({"what": 1, "tflops": 1.0}, "no kernel known by the keys tflops, what"),
    ],
)
def test_rows_that_cannot_be_repeated(
    write_rows: Write, values: dict[str, Any], reason: str
) -> None:
    published = read(write_rows, values)
    assert published.kernels == ()
    assert reason in published.not_expressed[0].reason


def test_a_flag_that_is_no_error_is_carried(write_rows: Write) -> None:
    row = one(write_rows, **GEMM, tflops=1.0, flag="above_peak_causal_counted_as_full")
    assert row.flags == ("above_peak_causal_counted_as_full",)


@pytest.mark.parametrize("values", [GEMM, GEMM | {"tflops": 0}, GEMM | {"m": "many"}])
def test_broken_rows(write_rows: Write, values: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"row 'somebody\[0\]': (tflops|m)"):
        read(write_rows, values)


def test_recognition() -> None:
    assert is_kernels({"t": {"rows": [GEMM | {"tflops": 1.0}]}})
    assert not is_kernels({"t": [GEMM]})
    assert not is_kernels({"nodes": [{"count": 1}]})
    assert not is_kernels([1])


@pytest.mark.slow
@pytest.mark.skipif(not DATA.exists(), reason="the shared tables are not beside this checkout")
def test_all_published_kernels_are_read_or_listed() -> None:
    published = read_kernels(DATA, load_yaml(DATA))
    total = 3782 + 635 + 17 + 4314 + 5 + 49 + 800
    assert len(published.kernels) + len(published.not_expressed) == total
    assert len(published.kernels) == 3782 - 56 + 635 + 14 + 4314
