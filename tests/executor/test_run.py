"""Whole runs: on processes started here, and on ranks that torchrun started."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.run import run_plan
from claw_plan.executor.run_files import RunResult, median_timeline, read_timelines
from claw_plan.executor.step_times import ways_of
from claw_plan.planner.plan import load_plan, save_plan
from claw_plan.profiles.errors import InputError
from claw_plan.profiles.profile import load_profile
from claw_plan.profiles.work import CollectiveWork, OpWork

STEPS = 9


@pytest.fixture(scope="module")
def ran(
    tiny_plan: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunResult, list[dict[str, Any]]]:
    """A pipeline of two stages, and the lines told while it ran."""
    lines: list[dict[str, Any]] = []
    plan = tiny_plan("run", pp=2)
    folder = tmp_path_factory.mktemp("runs")
    result = run_plan(plan, STEPS, runs=folder, on_step=lambda line: lines.append(dict(line)))
    assert result is not None
    return result, lines


@pytest.mark.slow
def test_a_run_reports_losses_times_and_memory(
    ran: tuple[RunResult, list[dict[str, Any]]],
) -> None:
    result, lines = ran
    assert len(result.losses) == STEPS
    times = result.step_time_ms
    assert 0 < times["min"] <= times["median"] <= times["max"]
    assert len(result.peak_memory_bytes) == 2 and min(result.peak_memory_bytes) > 0
    assert result.predicted_step_time_ms is None
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in lines] == result.losses
    assert [line["way"] for line in lines] == ways_of(STEPS)


@pytest.mark.slow
def test_a_run_leaves_its_step_and_its_measurements(
    ran: tuple[RunResult, list[dict[str, Any]]],
) -> None:
    folder = Path(ran[0].run)
    timelines = read_timelines(folder)
    assert list(timelines) == [3, 7, 9]
    timeline = median_timeline(timelines)
    assert timeline.origin == "measured" and timeline.ranks == (0, 1)
    kinds = {span.kind for span in timeline.spans}
    assert {"forward", "backward", "optimizer", "pp_comm"} <= kinds
    forwards = [s.name for s in timeline.spans if s.kind == "forward" and s.rank == 1]
    assert list(dict.fromkeys(forwards)) == [f"1F{index}" for index in range(8)]
    found = load_profile(folder / "measurements.profile").measurements
    sends = [m.work for m in found if isinstance(m.work, CollectiveWork) and m.work.op == "send"]
    # One sample of 16 tokens, 32 wide, in fp32.
    assert [work.bytes for work in sends] == [16 * 32 * 4]
    assert {m.work.kind for m in found if isinstance(m.work, OpWork)} == {
        "gemm",
        "attention",
        "memory",
        "optimizer",
    }
    assert {m.ranks_per_host for m in found} == {2}


@pytest.mark.slow
def test_the_plan_of_a_run_can_be_run_again(
    ran: tuple[RunResult, list[dict[str, Any]]], tmp_path: Path
) -> None:
    again = run_plan(Path(ran[0].run) / "plan.yaml", 2, runs=tmp_path)
    assert again is not None
    assert again.losses == ran[0].losses[:2]


@pytest.mark.slow
def test_ranks_of_torchrun_are_joined(
    ran: tuple[RunResult, list[dict[str, Any]]], tiny_plan: Callable[..., Path], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\n"
        "from claw_plan.executor.run import run_plan\n"
        "result = run_plan(Path(sys.argv[1]), 2, runs=Path(sys.argv[2]))\n"
        "import os\n"
        "Path(sys.argv[2], 'rank' + os.environ['RANK']).write_text(\n"
        "    str(result.losses if result else None))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(script), str(tiny_plan("run", pp=2)), str(tmp_path)]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    assert (tmp_path / "rank0").read_text() == str(ran[0].losses[:2])
    assert (tmp_path / "rank1").read_text() == "None"
    [result] = tmp_path.glob("*/result.json")
    assert json.loads(result.read_text())["losses"] == ran[0].losses[:2]


@pytest.mark.slow
def test_every_plan_trains_on_the_same_batches(
    ran: tuple[RunResult, list[dict[str, Any]]], tiny_plan: Callable[..., Path], tmp_path: Path
) -> None:
    other = run_plan(tiny_plan("run-shard", dp_shard=2), STEPS, runs=tmp_path)
    assert other is not None
    assert other.losses == pytest.approx(ran[0].losses, abs=1e-5)


@pytest.mark.slow
def test_a_model_that_fails_is_told_with_rank_and_step(
    tiny_plan: Callable[..., Path], tmp_path: Path
) -> None:
    text = tmp_path / "data.txt"
    text.write_bytes(bytes(1000))
    with pytest.raises(ExecutionError, match=r"transformer\.wte holds 61; use a model"):
        run_plan(tiny_plan("vocabulary", dp_replicate=2), 2, data=text, runs=tmp_path / "runs")


def test_bad_input_is_refused_before_anything_starts(
    tiny_plan: Callable[..., Path], tmp_path: Path
) -> None:
    plan = tiny_plan("bad-input")
    with pytest.raises(InputError, match="--steps is at least 1"):
        run_plan(plan, 0, runs=tmp_path)
    with pytest.raises(InputError, match="is not a file"):
        run_plan(plan, 1, data=tmp_path / "none.txt", runs=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_for_gpus_says_so_where_there_are_none(
    tiny_plan: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    plan = load_plan(tiny_plan("gpus"))
    cluster = {"name": "one", "nodes": [{"count": 1, "type": "dgx-h100"}]}
    save_plan(plan.model_copy(update={"cluster": cluster}), tmp_path / "plan.yaml")
    with pytest.raises(ExecutionError, match="has no GPU; run it there, or plan"):
        run_plan(tmp_path / "plan.yaml", 1, runs=tmp_path)


def test_bad_data_and_too_many_processes_are_refused_before_any_rank_starts(
    tiny_plan: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "short.txt").write_text("abc")
    with pytest.raises(InputError, match="has 3 bytes, but one sample needs 17"):
        run_plan(tiny_plan("short"), 1, data=tmp_path / "short.txt", runs=tmp_path / "runs")
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr("claw_plan.executor.run.RANKS_PER_CORE", 1)
    with pytest.raises(ExecutionError, match="starts 2 processes on this machine's 1 cores"):
        run_plan(tiny_plan("many", dp_shard=2), 1, runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
