from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from claw_plan.profiles.fit.kernels import FITTER, fit_kernels
from claw_plan.profiles.fit.registry import DataFile

SIZES = (256, 512, 1024, 4096)


def data_file(gpu: str = "H100 (sm_90)") -> DataFile:
    """Products at 500 TFLOP/s after 5 us."""
    rows: list[dict[str, Any]] = []
    for m, n, k in product(SIZES, SIZES, SIZES):
        flops = 2 * m * n * k
        rate = flops / (5e-6 + flops / 500e12) / 1e12
        rows.append({"gpu": gpu, "batch": 1, "m": m, "n": n, "k": k, "tflops": rate,
                     "dtype": "bf16xbf16->bf16"})  # fmt: skip
    data = {"xla_matmul_table": {"rows": rows}}
    return DataFile(path=Path("some.yaml"), data=data, sha256="0123456789abcdef" * 4)


@pytest.mark.slow
def test_the_same_data_gives_the_same_files() -> None:
    made = fit_kernels([data_file()])
    assert made == fit_kernels([data_file()])
    assert set(made) == {"gemm_shapes.json", "attention_shapes.json", "gemm_times.csv"}


def test_files_name_their_data_and_their_error() -> None:
    made = fit_kernels([data_file()])
    shapes = json.loads(made["gemm_shapes.json"])
    assert shapes["from"] == ["some.yaml (sha256 0123456789abcdef)"]
    (table,) = shapes["tables"].values()
    assert table["table"] == "h100-sxm-80gb/bfloat16/xla"
    assert table["left_out"]["rows"] == 64
    assert table["left_out"]["median_pct"] < 6
    assert json.loads(made["attention_shapes.json"])["tables"] == {}


def test_times_of_tables_in_use_are_kept_to_the_nanosecond() -> None:
    lines = fit_kernels([data_file()])["gemm_times.csv"].splitlines()
    assert len(lines) == 2 + 64
    expected_ns = round(5_000 + 2 * 256 * 512 * 4096 / 500e12 * 1e9)
    assert f"h100-sxm-80gb/bfloat16/xla,1,256,512,4096,0,{expected_ns}" in lines


def test_only_kernel_files_are_recognised() -> None:
    assert FITTER.recognises(data_file())
    other = DataFile(path=Path("x.yaml"), data={"nccl_tests": {}}, sha256="")
    assert not FITTER.recognises(other)
    assert not FITTER.recognises(DataFile(path=Path("x.csv"), data=[{"a": 1}], sha256=""))
