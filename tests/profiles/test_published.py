"""Kinds of files are told by their content."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.published import read_published
from claw_plan.profiles.published_rows import COLLECTIVES, ITERATIONS, KERNELS, TRAINING

Write = Callable[..., Path]
GEMM = {"gpu": "B200", "m": 256, "n": 256, "k": 256, "tflops": 10.0}
COLLECTIVE = {"collective": "all_reduce", "gpu": "H100", "ranks": 8, "bytes": 8, "time_us": 20.0}
ITERATION = (
    "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,"
    "tensor parallelism,data parallelism,pipeline parallelism,iteration time (ms)\n"
    "2,16,8,1024,16,24,1024,1,1,2,372.16\n"
)


def test_kinds(row: Callable[..., dict[str, Any]], write_rows: Write, tmp_path: Path) -> None:
    assert read_published(write_rows([row()])).kind == TRAINING
    assert read_published(write_rows({"t": {"rows": [GEMM]}})).kind == KERNELS
    assert read_published(write_rows({"t": [COLLECTIVE]}, "odd.name")).kind == COLLECTIVES
    path = tmp_path / "times.txt"
    path.write_text(ITERATION, encoding="utf-8")
    assert read_published(path).kind == ITERATIONS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("nodes: [{count: 2, type: dgx-h100}]", "a mapping with the keys nodes"),
        ("- 1\n- 2", "a list of 2"),
        ("step,loss\n1,2", "no published measurements (str)"),
        ("a: [", "not YAML"),
    ],
)
def test_files_of_no_known_kind(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "some.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as error:
        read_published(path)
    assert message in str(error.value)
    assert "some.yaml" in str(error.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no file"):
        read_published(tmp_path / "none.yaml")
