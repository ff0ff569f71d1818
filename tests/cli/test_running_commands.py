"""`run`, `verify` and `learn` with an executor that answers at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from claw_plan.cli.main import cli
from claw_plan.executor import learn, verify
from claw_plan.executor import run as run_module
from claw_plan.executor.checkpoint_options import CheckpointOptions
from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.run_files import RunResult
from claw_plan.executor.verify import VerifyResult

RUN = RunResult(
    losses=[5.5, 4.25],
    step_time_ms={"median": 120.0, "min": 118.0, "max": 140.0},
    process_time_ms=110.0,
    samples_per_s=133.3,
    tokens_per_s=None,
    predicted_step_time_ms=108.0,
    peak_memory_bytes=[20, 30],
    predicted_memory_gib=None,
    parts_ms={},
    data="random batches",
    run="runs/1",
)
SAME = VerifyResult(
    ok=True,
    steps=5,
    fp64_max_loss_diff=1e-15,
    fp64_max_param_diff=2e-15,
    fp32_max_loss_diff=1e-7,
    first_difference="",
)

Patch = Callable[[Any, str, Any], None]


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Patch:
    monkeypatch.chdir(tmp_path)
    return monkeypatch.setattr


def call(*args: str) -> Result:
    return CliRunner().invoke(cli, list(args))


def test_run_passes_everything_on_and_prints_only_json(patch: Patch) -> None:
    asked: dict[str, Any] = {}

    def run_plan(plan: Path, steps: int, **settings: Any) -> RunResult:
        print("a model that prints")
        launch = settings.pop("launch")
        asked.update(timeout_s=launch.timeout_s, preflight=launch.preflight)
        settings.pop("on_step")({"step": 1, "loss": 5.5, "step_time_ms": 120.0})
        asked.update(plan=plan, steps=steps, **settings)
        return RUN

    patch(run_module, "run_plan", run_plan)
    result = call(
        *["run", "plan.yaml", "--steps", "7", "--data", "t.txt", "--runs", "out", "--json"],
        *["--timeout", "30", "--no-preflight"],
    )
    assert result.exit_code == 0
    assert asked == {
        "plan": Path("plan.yaml"),
        "steps": 7,
        "timeout_s": 30.0,
        "preflight": False,
        "data": Path("t.txt"),
        "runs": Path("out"),
        "checkpoints": CheckpointOptions(),
    }
    assert json.loads(result.stdout) == {
        "losses": [5.5, 4.25],
        "step_time_ms": {"median": 120.0, "min": 118.0, "max": 140.0},
        "predicted_step_time_ms": 108.0,
        "unlike_plan": None,
        "peak_memory_bytes": [20, 30],
        "run": "runs/1",
        "checkpoint": None,
        "traffic": [],
        "traffic_differences": [],
        "algorithms": {},
    }


def test_run_prints_nothing_on_other_ranks(patch: Patch) -> None:
    patch(run_module, "run_plan", lambda *args, **settings: None)
    result = call("run", "plan.yaml")
    assert (result.exit_code, result.stdout) == (0, "")


def test_a_rank_that_fails_is_one_line(patch: Patch) -> None:
    def fails(*args: Any, **settings: Any) -> None:
        raise ExecutionError("rank 1 was killed by SIGKILL at step 3; its output is in rank1.log")

    patch(run_module, "run_plan", fails)
    result = call("run", "plan.yaml", "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("claw-plan: rank 1 was killed by SIGKILL at step 3")


def test_verify_answers_with_its_exit_code(patch: Patch) -> None:
    patch(verify, "verify_plan", lambda plan, steps, data: SAME)
    result = call("verify", "plan.yaml", "--json")
    assert result.exit_code == 0
    value = json.loads(result.stdout)
    assert value["ok"] is True and value["first_difference"] is None and "reason" not in value
    differs = replace(SAME, ok=False, first_difference="wte.weight on rank 1 after step 1")
    patch(verify, "verify_plan", lambda plan, steps, data: differs)
    result = call("verify", "plan.yaml", "--json")
    assert result.exit_code == 1
    assert "wte.weight on rank 1" in json.loads(result.stdout)["reason"]
    assert "does not train like one process: wte.weight" in result.stderr
    assert call("verify", "plan.yaml").exit_code == 1


def test_learn_says_which_folders_it_left_out(patch: Patch) -> None:
    run = learn.LearnedRun(
        run="runs/1", knobs="tp=2", measured_ns=100, before_ns=150, after_ns=104
    )

    def learn_from(folders: Any, profile: Path | None, progress: Any) -> learn.Learned:
        assert list(folders) == [Path("runs/1"), Path("runs/2")]
        assert profile == Path("p.profile")
        return learn.Learned(
            profile=Path("p.profile"), measurements=3, runs=(run,), skipped=("runs/2",)
        )

    patch(learn, "learn", learn_from)
    result = call("learn", "runs/1", "runs/2", "--profile", "p.profile")
    assert result.exit_code == 0
    assert "left out runs/2: no finished run" in result.stderr
    assert "is 4.0 % for these runs" in result.stdout


def test_learn_needs_a_run() -> None:
    result = call("learn")
    assert result.exit_code == 2 and "Missing argument 'RUN...'" in result.stderr


@pytest.mark.parametrize("command", ["run", "verify", "simulate"])
def test_a_missing_plan_is_one_line(command: str, patch: Patch, tmp_path: Path) -> None:
    result = call(command, "none.yaml", "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1 and "none.yaml" in result.stderr
    assert list(tmp_path.iterdir()) == []
