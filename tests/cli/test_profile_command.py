"""`claw-plan profile` through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from claw_plan.cli.main import cli
from claw_plan.executor.errors import ExecutionError
from claw_plan.profiles.measurement import Measurement
from claw_plan.profiles.profile import load_profile
from claw_plan.profiles.work import OpWork

MODEL = """
import torch, torch.nn as nn

def build_model():
    return nn.Linear(8, 8)

def example_batch(n):
    return {"input": torch.randn(n, 8)}

def loss(output, batch):
    return output.sum()
"""


def test_measurements_are_added_to_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(MODEL)
    done = CliRunner().invoke(cli, ["profile", "tiny.py", "--batch", "2"])
    assert done.exit_code == 0, done.output
    first = load_profile(tmp_path / "tiny.profile").measurements
    assert any(m.work.kind == "gemm" for m in first)  # type: ignore[union-attr]
    CliRunner().invoke(cli, ["profile", "tiny.py", "--batch", "4"])
    assert len(load_profile(tmp_path / "tiny.profile").measurements) > len(first)


def test_the_model_is_not_overwritten(tmp_path: Path) -> None:
    model = tmp_path / "tiny.py"
    model.write_text(MODEL)
    done = CliRunner().invoke(cli, ["profile", str(model), "-o", str(model)])
    assert done.exit_code == 2
    assert model.read_text() == MODEL


def test_a_model_that_no_device_holds_is_measured_on_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # microsoft/nnscaler issue 7: profiling an operator of 70B crashed where it did not fit.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(MODEL)
    work = OpWork(kind="gemm", dims=(1, 2, 2, 2), dtype="float32", flops=16, bytes=48)
    asked: list[int] = []

    def whole(*args: object, **settings: object) -> list[Measurement]:
        raise ExecutionError("the model does not fit cuda:0")

    def divided(loaded: object, batches: object, ranks: int, **settings: object) -> Any:
        asked.append(ranks)
        yield [Measurement(device="h100-sxm", work=work, samples_ns=(5,))]

    monkeypatch.setattr("claw_plan.executor.profile_model.profile_model", whole)
    monkeypatch.setattr("claw_plan.executor.profile_ranks.profile_ranks", divided)
    monkeypatch.setattr("claw_plan.executor.profile_ranks.local_cluster", lambda ranks: None)
    alone = CliRunner().invoke(cli, ["profile", "tiny.py"])
    assert alone.exit_code == 2 and "does not fit cuda:0" in alone.stderr
    assert not (tmp_path / "tiny.profile").exists()
    done = CliRunner().invoke(cli, ["profile", "tiny.py", "--gpus", "4", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {
        "profile": "tiny.profile",
        "devices": ["h100-sxm"],
        "kernels": 1,
        "collectives": 0,
        "warnings": ["the model does not fit cuda:0"],
    }
    assert "does not fit cuda:0" in done.stderr
    assert asked == [4]
    assert len(load_profile(tmp_path / "tiny.profile").measurements) == 1
