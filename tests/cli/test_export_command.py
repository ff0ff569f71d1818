from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from claw_plan.cli.main import cli
from claw_plan.executor import export


def test_a_script_is_written_or_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def export_plan(plan: Path, script: Path) -> str:
        print("a model that prints")
        asked.append(script)
        return "import torch\n"

    monkeypatch.setattr(export, "export_plan", export_plan)
    script = tmp_path / "train.py"
    result = CliRunner().invoke(cli, ["export", "plan.yaml", "--to", "torch", "-o", str(script)])
    assert result.exit_code == 0 and script.read_text() == "import torch\n"
    assert "how to start it" in result.stderr and result.stdout == ""
    printed = CliRunner().invoke(cli, ["export", "plan.yaml"])
    assert printed.stdout == "import torch\n"
    assert asked == [script, Path("train.py")]


def test_a_plan_is_never_written_over(tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.yaml")
    result = CliRunner().invoke(cli, ["export", plan, "-o", plan])
    assert result.exit_code == 2
