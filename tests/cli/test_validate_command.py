"""`claw-plan validate` from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from claw_plan.cli.validate_command import validate
from claw_plan.profiles.errors import InputError

ROW: dict[str, Any] = {
    "id": "run-1",
    "family": "somebody",
    "model": {
        "name": "tiny",
        "layers": 2,
        "hidden": 64,
        "heads": 2,
        "ffn": 256,
        "vocab": 128,
        "gated_mlp": False,
        "seq_len": 32,
    },
    "hardware": {"gpu": "A100-80GB", "count": 2, "gpus_per_node": 8},
    "plan": {
        "dp": 2,
        "micro_batch": 1,
        "global_batch": 8,
        "sharding": "none",
        "recompute": "none",
        "precision": "bf16",
    },
    "measured": {"step_time_s": 0.02},
}
COLLECTIVES = {
    "nccl_tests": [
        {"collective": "all_reduce", "gpu": "H100", "ranks": 8, "bytes": size, "time_us": 50.0}
        for size in (1024, 1 << 20)
    ]
}


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    runs, collectives = tmp_path / "runs.yaml", tmp_path / "collectives.yaml"
    other = {**ROW, "id": "run-2", "family": "other", "hardware": {"gpu": "TPU", "count": 2}}
    runs.write_text(yaml.safe_dump([ROW, other]), encoding="utf-8")
    collectives.write_text(yaml.safe_dump(COLLECTIVES), encoding="utf-8")
    return str(runs), str(collectives)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(validate, arguments, catch_exceptions=False)


def test_several_kinds_of_file_at_once(files: tuple[str, str]) -> None:
    result = call(*files, "--json")
    found = json.loads(result.stdout)
    assert [row["id"] for row in found["rows"]] == ["run-1", "nccl_tests[0]", "nccl_tests[1]"]
    assert found["rows"][0]["predicted"] > 0
    assert found["summary"]["not_expressed"]["count"] == 1
    assert set(found["summary"]) == {
        *("overall", "assumed", "memory", "not_expressed"),
        *("somebody", "all_reduce H100"),
    }


def test_the_report(files: tuple[str, str]) -> None:
    text = call(*files).stdout
    assert "run-1  step_time  predicted" in text
    assert "not expressed  run-2: no figures for the GPU 'TPU'" in text
    assert "Errors of step times" in text
    assert "Errors of collective times" in text


def test_only_some_rows(files: tuple[str, str]) -> None:
    found = json.loads(call(*files, "--json", "--rows", "nccl_tests[1]").stdout)
    assert [row["id"] for row in found["rows"]] == ["nccl_tests[1]"]
    found = json.loads(call(*files, "--json", "--rows", "nccl*").stdout)
    assert len(found["rows"]) == 2
    found = json.loads(call(*files, "--json", "--families", "somebody").stdout)
    assert [row["id"] for row in found["rows"]] == ["run-1"]
    assert found["summary"]["not_expressed"]["count"] == 0


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--families", "somebod", "did you mean 'somebody'"),
        ("--rows", "run-9", "no row is called so; did you mean"),
        ("--rows", "zzz", "the first is 'run-1'"),
    ],
)
def test_rows_that_are_not_there(
    files: tuple[str, str], option: str, value: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        call(*files, option, value)


def test_the_board_is_written(files: tuple[str, str], tmp_path: Path) -> None:
    page = tmp_path / "accuracy.md"
    result = call(files[1], "--write", str(page))
    assert "nccl_tests[0]" in result.stdout
    assert "# Accuracy" in page.read_text(encoding="utf-8")
    assert (tmp_path / "accuracy" / "collective_time.svg").exists()


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("nodes: [{count: 2}]", encoding="utf-8")
    with pytest.raises(InputError, match=r"cluster\.yaml holds no published measurements"):
        call(str(path))


def test_a_page_does_not_replace_what_is_read(files: tuple[str, str]) -> None:
    with pytest.raises(InputError, match="this command uses that file otherwise too"):
        call(files[1], "--write", files[1])
