"""`claw-plan profile` through the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from claw_plan.cli.main import cli
from claw_plan.profiles.profile import load_profile

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
