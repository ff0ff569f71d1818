"""--slurm and --print-command start nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from claw_plan.cli.main import cli
from claw_plan.planner.plan import load_plan

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan for this machine, made by the planner itself."""
    path = tmp_path / "plan.yaml"
    arguments = [str(EXAMPLES / "gpt_small.py"), "--cluster", "cpu", "--global-batch", "16"]
    result = CliRunner().invoke(cli, [*arguments, "-o", str(path)])
    assert result.exit_code == 0, result.output
    return path


@pytest.mark.slow
def test_command_lines_and_a_batch_script_instead_of_a_run(
    plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["run", str(plan), "--steps", "3", "--slurm", "--print-command"]
    monkeypatch.setattr(sys, "argv", ["claw-plan", *arguments])
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    ranks = load_plan(plan).knobs().num_devices
    script = plan.with_suffix(".sbatch")
    assert f"sbatch {script}" in result.stdout
    assert f"torchrun --standalone --nproc-per-node={ranks} --no-python " in result.stdout
    assert f"#SBATCH --ntasks-per-node={ranks}" in script.read_text()
    for text in (result.stdout, script.read_text()):
        assert f"run {plan} --steps 3" in text and "--print-command" not in text


def test_a_timeout_of_nothing_is_refused() -> None:
    result = CliRunner().invoke(cli, ["run", "plan.yaml", "--timeout", "0"])
    assert result.exit_code == 2 and "--timeout" in result.stderr
