"""Runs that are stopped or killed and go on: as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from claw_plan.executor.checkpoint_export import whole_weights
from claw_plan.executor.checkpoint_folder import CHECKPOINTS, checkpoints_in, name_of
from claw_plan.executor.checkpoint_options import CheckpointOptions
from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.job import TRAIN, Job
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import compile_plan
from claw_plan.executor.ranks import Rank
from claw_plan.executor.run import run_plan
from claw_plan.executor.run_checkpoints import RunCheckpoints
from claw_plan.planner.plan import load_plan, save_plan

STEPS, BATCH = 8, 4

MODEL = '''
import os, time, torch, torch.nn as nn
class Net(nn.Module):
    """Notes the samples that it is trained on."""
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.drop = nn.Dropout(0.5)
    def forward(self, x, number):
        with open(os.environ["SEEN"], "a") as file:
            file.write("".join(f"{one}\\\\n" for one in number.tolist()))
        for layer in self.layers:
            x = self.drop(layer(x)).tanh() + x
        return x.square().mean()
def build_model(): return Net()
def example_batch(n): return {"x": torch.randn(n, 6), "number": torch.arange(n) + 10**6}
def train_data(rank, world_size):
    """Three samples a time, so that batches begin inside of them."""
    for first in range(0, 1000, 3):
        time.sleep(float(os.environ.get("PAUSE", 0)))
        yield {"x": torch.randn(3, 6), "number": torch.arange(first, first + 3)}
'''.replace("\\\\n", "\\n")


def started(plan: Path, folder: Path, *options: str) -> subprocess.Popen[bytes]:
    program = Path(sys.executable).with_name("claw-plan")
    command = [
        program,
        "run",
        plan,
        "--steps",
        STEPS,
        "--runs",
        folder,
        "--no-preflight",
        *options,
    ]
    environment = os.environ | {"PAUSE": "0.2", "SEEN": str(folder / "seen")}
    return subprocess.Popen(list(map(str, command)), env=environment, stderr=subprocess.PIPE)


def wait_for_steps(folder: Path, number: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        lines = [line for f in folder.glob("*/steps.jsonl") for line in f.read_text().splitlines()]
        if len(lines) >= number:
            return
        time.sleep(0.02)
    raise AssertionError(f"no step {number} in {folder}")


def losses_of(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "steps.jsonl").read_text().splitlines()]


def run_in(folder: Path) -> Path:
    [run] = (path for path in folder.iterdir() if path.is_dir())
    return run


@pytest.fixture(scope="module")
def plan(write_any: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("net") / "net.py"
    file.write_text(MODEL)
    return write_any(
        file, "plan", ["layers.0", "layers.1"], dp_shard=2, global_batch=BATCH, microbatch_size=2
    )


@pytest.fixture(scope="module")
def uninterrupted(plan: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run, with a checkpoint of its end."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEEN", str(folder / "seen"))
        run_plan(plan, STEPS, runs=folder, checkpoints=CheckpointOptions(every=STEPS))
    return folder


def end_of(folder: Path) -> dict[str, torch.Tensor]:
    return whole_weights(checkpoints_in(run_in(folder) / CHECKPOINTS)[-1])


def assert_it_ends_alike(
    plan: Path, stopped: Path, uninterrupted: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> int:
    """Resumes and compares bit for bit; how many steps were done before."""
    latest = checkpoints_in(stopped / CHECKPOINTS)[-1]
    monkeypatch.setenv("SEEN", str(folder / "seen"))
    options = CheckpointOptions(every=STEPS, resume=str(latest))
    result = run_plan(plan, STEPS, runs=folder, checkpoints=options)
    assert result is not None
    done = int(latest.name.removeprefix("step-"))
    expected = losses_of(run_in(uninterrupted))
    assert losses_of(stopped)[:done] == expected[:done]
    assert result.losses == expected[done:]
    weights = end_of(uninterrupted)
    for name, value in end_of(folder).items():
        assert torch.equal(value, weights[name]), name
    return done


def seen(*folders: Path) -> Counter[int]:
    """How often each sample was trained on; example batches, from 10^6, are no training."""
    found = (int(n) for folder in folders for n in (folder / "seen").read_text().split())
    return Counter(number for number in found if number < 10**6)


@pytest.mark.slow
def test_a_run_that_was_asked_to_stop_goes_on_without_losing_a_sample(
    plan: Path, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    process = started(plan, first, "--checkpoint-every", "100")
    wait_for_steps(first, 3)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, said
    latest = checkpoints_in((run_in(first) / CHECKPOINTS).resolve())[-1]
    assert f"; go on with --resume {latest}" in said.decode()
    done = assert_it_ends_alike(plan, run_in(first), uninterrupted, second, monkeypatch)
    assert 3 <= done < STEPS
    once = Counter(range(STEPS * BATCH))
    assert seen(uninterrupted) == once
    assert seen(first, second) == once


@pytest.mark.slow
def test_a_rank_that_was_killed_costs_the_steps_since_the_last_checkpoint(
    plan: Path, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    process = started(plan, first, "--checkpoint-every", "2")
    wait_for_steps(first, 5)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2, said
    done = assert_it_ends_alike(plan, run_in(first), uninterrupted, second, monkeypatch)
    assert done >= 2 and done % 2 == 0
    # What the resumed run trained on is what came after its checkpoint, each sample once.
    assert seen(second) == Counter(range(done * BATCH, STEPS * BATCH))


@pytest.mark.slow
def test_another_plan_goes_on_too(tiny_plan: Callable[..., Path], tmp_path: Path) -> None:
    every = CheckpointOptions(every=2, keep=None)
    whole = run_plan(tiny_plan("four", dp_shard=4), 5, runs=tmp_path, checkpoints=every)
    assert whole is not None
    assert whole.checkpoint == str(Path(whole.run).resolve() / CHECKPOINTS / "step-00000005")
    options = CheckpointOptions(resume=str(Path(whole.run) / CHECKPOINTS / "step-00000002"))
    for name, knobs in {"tp": {"tp": 2}, "pp": {"pp": 2}, "one": {}}.items():
        resumed = run_plan(tiny_plan(name, **knobs), 5, runs=tmp_path, checkpoints=options)
        assert resumed is not None
        assert resumed.losses == pytest.approx(whole.losses[2:], abs=1e-6)


@pytest.mark.slow
def test_replicas_that_differ_are_saved_once_they_meet(
    tiny_plan: Callable[..., Path], tmp_path: Path
) -> None:
    """0/1 Adam after one step of warm-up: they meet in steps 2, 4 and 6, and after the last."""
    path = tiny_plan("zero_one", dp_replicate=2, codec="zero_one:2")
    plan = load_plan(path)
    short = {"codec_warmup_steps": 1, "meeting_repeats": 1}
    save_plan(plan.model_copy(update={"training": plan.training.model_copy(update=short)}), path)
    lines: list[dict[str, object]] = []
    every = CheckpointOptions(every=3, keep=None)
    result = run_plan(path, 5, runs=tmp_path, checkpoints=every, on_step=lines.append)
    assert result is not None
    saved = checkpoints_in(Path(result.run) / CHECKPOINTS)
    assert [one.name for one in saved] == [name_of(4), name_of(5)]
    notes = {line["step"]: line["note"] for line in lines if "note" in line}
    assert notes == {
        3: "what is to be saved after step 3 waits until replicas meet",
        5: "replicas met out of turn after step 5, the last",
    }
    again = run_plan(path, 5, runs=tmp_path, checkpoints=CheckpointOptions(resume=str(saved[0])))
    assert again is not None and again.losses == result.losses[4:]


def test_a_last_checkpoint_that_cannot_be_written_fails_the_run(
    tiny_plan: Callable[..., Path], alone: Rank, tmp_path: Path
) -> None:
    path = tiny_plan("last")
    opened = open_plan(path)
    compiled = compile_plan(opened[0], opened[1], alone.device)
    job = Job(
        kind=TRAIN,
        folder=tmp_path,
        plans=(path,),
        steps=9,
        checkpoint_folder=str(tmp_path / "c"),
        checkpoint_every=3,
    )
    checkpoints = RunCheckpoints(job, compiled)
    assert checkpoints.after_step(1, ends=False) == ""
    (tmp_path / "c").rmdir()
    (tmp_path / "c").write_text("a file stands where the folder was")
    assert checkpoints.after_step(3, ends=False) == ""
    deadline = time.monotonic() + 30
    while not (said := checkpoints.after_step(4, ends=False)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "of step 3 is not written" in said and said.endswith("; training goes on")
    assert checkpoints.after_step(6, ends=False) == ""
    assert "of step 6 is not written" in checkpoints.after_step(9, ends=False)
    with pytest.raises(ExecutionError, match=r"of step 9 is not written .*older checkpoints"):
        checkpoints.after_step(9, ends=True)
