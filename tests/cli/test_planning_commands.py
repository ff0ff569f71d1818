"""`plan` and `simulate` with a planner that answers at once; the real one is in tests/planner."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from claw_plan.cli.main import cli
from claw_plan.planner.errors import InfeasiblePlan, PlanError
from claw_plan.planner.mixed import result as mixed_result
from claw_plan.planner.plan import load_plan


class Planner:
    """Stands in for the planner: keeps what it was asked, answers with `result` or raises."""

    def __init__(self, result: Any) -> None:
        self.result, self.error = result, None
        self.request: Any = None

    def make_plan(self, request: Any) -> Any:
        print("a model that prints when it is built")
        request.progress("searching", 0.5)
        self.request = request
        if self.error is not None:
            raise self.error
        return self.result

    def simulate_plan(self, path: Path, profile: Path | None = None) -> Any:
        self.request = (path, profile)
        return self.result.best


@pytest.fixture
def planner(result: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Planner:
    fake = Planner(result)
    monkeypatch.setattr(mixed_result, "plan_request", fake.make_plan)
    monkeypatch.setattr(mixed_result, "simulate_file", fake.simulate_plan)
    monkeypatch.chdir(tmp_path)
    return fake


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, list(args))


def test_the_report_is_on_stdout_and_nothing_is_written(planner: Planner, tmp_path: Path) -> None:
    result = run("model.py", "--cluster", "2xdgx-h100")
    assert result.exit_code == 0
    assert "Best plan" in result.stdout and "-o plan.yaml" in result.stdout
    assert "prints when it is built" not in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_flags_reach_the_planner(planner: Planner) -> None:
    run(
        *["plan", "model.py", "-c", "cpu", "--global-batch", "64", "--seq-len", "512"],
        *["--precision", "bf16", "--optimizer", "sgd", "--memory-headroom", "0.2"],
        *["--clip-norm", "1.5"],
        *["--fix", "tp=2,pp=2,schedule=1F1B", "--top", "5", "--seed", "7", "--time-limit", "9"],
        *["--build", "GPT()", "--inputs", "x=float32[B,4]", "--profile", "p.profile"],
    )
    request = planner.request
    assert (request.model, request.cluster) == (Path("model.py"), "cpu")
    assert (request.global_batch, request.seq_len) == (64, 512)
    assert (request.precision, request.optimizer) == ("bf16", "sgd")
    assert (request.memory_headroom, request.clip_norm) == (0.2, 1.5)
    assert request.fix == {"tp": 2, "pp": 2, "schedule": "1F1B"}
    assert (request.top, request.seed, request.time_limit_s) == (5, 7, 9.0)
    assert (request.build, request.inputs) == ("GPT()", "x=float32[B,4]")
    assert request.profile == Path("p.profile")


def test_settings_that_are_not_given_are_left_to_the_cluster_file(planner: Planner) -> None:
    run("model.py", "-c", "cpu")
    request = planner.request
    left = (request.global_batch, request.seq_len, request.precision, request.optimizer)
    assert left == (None, None, None, None)
    assert request.fix == {} and request.time_limit_s is None


def test_json_is_alone_on_stdout(planner: Planner) -> None:
    result = run("model.py", "-c", "cpu", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["step_time_ms"] == 40.0


def test_the_plan_and_the_trace_are_written(planner: Planner, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    result = run("model.py", "-c", "cpu", "-o", "out/a plan.yaml", "--trace", "out/t.json")
    assert result.exit_code == 0
    assert load_plan(tmp_path / "out" / "a plan.yaml") == planner.result.plan
    assert json.loads((tmp_path / "out" / "t.json").read_text())["traceEvents"]
    assert planner.request.output_folder == tmp_path / "out"
    assert "claw-plan run 'out/a plan.yaml'" in result.stdout
    assert "wrote the plan to out/a plan.yaml" in result.stderr


def test_no_plan_fits(planner: Planner, tmp_path: Path) -> None:
    planner.error = InfeasiblePlan("nothing fits: 12.0 GiB too much on stage 0")
    result = run("model.py", "-c", "cpu", "-o", "plan.yaml")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.endswith("claw-plan: nothing fits: 12.0 GiB too much on stage 0\n")
    assert list(tmp_path.iterdir()) == []


def test_no_plan_fits_as_json_still_prints_the_object(planner: Planner) -> None:
    planner.error = InfeasiblePlan("nothing fits")
    result = run("model.py", "-c", "cpu", "--json")
    assert result.exit_code == 1
    value = json.loads(result.stdout)
    assert value["reason"] == "nothing fits" and value["plan"] is None


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_bad_input_writes_nothing(planner: Planner, flags: list[str], tmp_path: Path) -> None:
    planner.error = PlanError("tp=5 does not divide 12 heads; use 1, 2, 3, 4, 6 or 12")
    result = run("model.py", "-c", "cpu", "-o", "plan.yaml", "--trace", "t.json", *flags)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith("claw-plan: tp=5 does not divide 12 heads")
    assert list(tmp_path.iterdir()) == []


def test_simulate_predicts_one_plan(planner: Planner) -> None:
    result = run("simulate", "plan.yaml", "--profile", "p.profile")
    assert result.exit_code == 0
    assert planner.request == (Path("plan.yaml"), Path("p.profile"))
    assert "Prediction for plan.yaml" in result.stdout
    value = json.loads(run("simulate", "plan.yaml", "--json").stdout)
    assert list(value) == [
        "step_time_ms",
        "samples_per_s",
        "tokens_per_s",
        "mfu",
        "memory",
        "parts_ms",
    ]


def test_simulate_says_when_the_plan_does_not_fit(planner: Planner) -> None:
    best = planner.result.best
    small = tuple(replace(stage, capacity_bytes=70 * 2**30) for stage in best.memory)
    planner.result.best = replace(best, memory=small)
    result = run("simulate", "plan.yaml", "--json")
    assert result.exit_code == 1
    said = "the plan does not fit: stage 1 needs 76.0 GiB on each device, 6.0 GiB more"
    assert said in json.loads(result.stdout)["reason"] and said in result.stderr
