"""Any plan reads what any other wrote, bit for bit; faults of checkpoints are one line."""

from __future__ import annotations

import random
import re
import resource
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from claw_plan.executor.checkpoint import Checkpointer, changed_numbers, group_numbers, why
from claw_plan.executor.checkpoint_folder import checkpoints_in
from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.job import VERIFY, Job
from claw_plan.executor.launch import start_ranks
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import ParallelModel, compile_plan
from claw_plan.executor.ranks import Rank
from claw_plan.profiles.errors import InputError

CHAIN = [sys.executable, str(Path(__file__).with_name("checkpoint_chain.py"))]

TWO: list[dict[str, Any]] = [
    {"dp_shard": 2},
    {"dp_shard": 2, "zero": 1},
    {"dp_shard": 2, "offload": "optimizer"},
    {"dp_shard": 2, "blocks_per_group": 3, "recompute": "full", "recompute_blocks": 1},
    {"dp_replicate": 2},
    {"tp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"tp": 2, "vocabulary_rows": "30,3,0-2,31-60,4-29"},
    {"pp": 2, "schedule": "1F1B"},
    {"pp": 2, "stages_per_rank": 2, "schedule": "Interleaved1F1B"},
    {"pp": 2, "stages_per_rank": 2, "schedule": "ZBVZeroBubble"},
]
FOUR: list[dict[str, Any]] = [
    {"dp_shard": 4},
    {"dp_shard": 4, "reshard_ranks": 2},
    {"tp": 4},
    {"dp_shard": 2, "tp": 2},
    {"dp_shard": 2, "tp": 2, "vocabulary_rows": "30,3,0-2,31-60,4-29"},
    {"dp_replicate": 2, "dp_shard": 2},
    {"pp": 2, "tp": 2},
    {"pp": 2, "dp_shard": 2, "zero": 1},
    {"pp": 4, "schedule": "1F1B"},
    {"dp_replicate": 2, "tp": 2},
]


def shuffled(plans: Sequence[Path], seed: int) -> tuple[Path, ...]:
    return tuple(random.Random(seed).sample(plans, len(plans)))


@pytest.mark.slow
def test_any_plan_reads_what_any_other_wrote(
    tiny_plan: Callable[..., Path], alone: Rank, tmp_path: Path
) -> None:
    """Two processes in random order, four, one: each plan reads the one before it."""
    before = ""
    for size, knobs in ((2, TWO), (4, FOUR)):
        plans = [tiny_plan(f"chain{size}-{i}", **one) for i, one in enumerate(knobs)]
        folder = tmp_path / str(size)
        folder.mkdir()
        ordered = shuffled(plans, size)
        job = Job(kind=VERIFY, folder=folder, plans=ordered, steps=1, resume=before)
        start_ranks(job, size, worker=CHAIN)
        before = str(folder / ordered[-1].stem / "step-00000007")
    compiled = compiled_alone(tiny_plan("chain1"), alone)
    Checkpointer(compiled, None).load(Path(before))
    runpy.run_path(CHAIN[1])["compare"](compiled)


def compiled_alone(plan: Path, rank: Rank) -> ParallelModel:
    opened = open_plan(plan)
    return compile_plan(opened[0], opened[1], rank.device)


@pytest.fixture
def trained(
    tiny_plan: Callable[..., Path], alone: Rank, tmp_path: Path
) -> tuple[ParallelModel, Path]:
    """One process after a step, and its checkpoint."""
    compiled = compiled_alone(tiny_plan("trained"), alone)
    idx = torch.arange(8 * 16).view(8, 16) % 61
    compiled.train_step({"idx": idx, "targets": idx})
    checkpointer = Checkpointer(compiled, tmp_path / "c", keep=1)
    checkpointer.save(1)
    assert checkpointer.finish() == ""
    return compiled, tmp_path / "c" / "step-00000001"


def test_plain_torch_reads_it(trained: tuple[ParallelModel, Path]) -> None:
    """As docs/checkpoints.md says."""
    compiled, path = trained
    name = "transformer.wte.weight"
    state = {
        "model": {n: torch.empty(compiled.whole.shapes[n]) for n in compiled.parameters},
        "optim": {"state": {name: {"exp_avg": torch.empty(61, 32), "step": torch.empty(())}}},
    }
    dcp.load(state, checkpoint_id=path, no_dist=True)
    for own, value in state["model"].items():
        assert torch.equal(value, compiled.parameters[own])
    held = compiled.optimizer.state[compiled.parameters[name]]
    assert torch.equal(state["optim"]["state"][name]["exp_avg"], held["exp_avg"])
    assert state["optim"]["state"][name]["step"] == 1


@pytest.mark.slow
def test_the_loss_scale_goes_on_where_it_was(
    tiny_plan: Callable[..., Path], alone: Rank, tmp_path: Path
) -> None:
    """Its value and the good steps behind it decide when it doubles and what is left out."""
    plan, idx = tiny_plan("scaled", precision="float16"), torch.arange(8 * 16).view(8, 16) % 61

    def step(compiled: ParallelModel) -> tuple[float, float, int]:
        loss, scale = compiled.train_step({"idx": idx, "targets": idx}), compiled.loss_scale
        assert scale is not None
        return loss, scale.factor, scale.good_steps

    first, second = compiled_alone(plan, alone), compiled_alone(plan, alone)
    assert first.loss_scale is not None and second.loss_scale is not None
    first.loss_scale.window = second.loss_scale.window = 3
    first.loss_scale.factor = 2.0**14
    before = [step(first) for _ in range(4)]
    assert before[-1][1:] == (2.0**15, 1)  # doubled after three good steps; one since
    checkpointer = Checkpointer(first, tmp_path / "c")
    checkpointer.save(4)
    assert checkpointer.finish() == ""
    Checkpointer(second, None).load(tmp_path / "c" / "step-00000004")
    after = [step(first) for _ in range(8)]
    assert [step(second) for _ in range(8)] == after
    assert after[0][2] == 2 and len({factor for _, factor, _ in after}) > 1


@pytest.mark.parametrize("kind", ["truncated", "missing", "flipped", "metadata"])
def test_a_damaged_file_is_named_and_nothing_changes(
    kind: str, trained: tuple[ParallelModel, Path]
) -> None:
    compiled, path = trained
    file = path / (".metadata" if kind == "metadata" else "__0_0.distcp")
    content = bytearray(file.read_bytes())
    if kind == "missing":
        file.unlink()
    elif kind == "truncated":
        file.write_bytes(content[:-100])
    else:
        content[:64] = bytes(64)
        file.write_bytes(content)
    before = {name: p.detach().clone() for name, p in compiled.parameters.items()}
    with pytest.raises((InputError, ExecutionError)) as raised:
        Checkpointer(compiled, None).load(path)
    said = str(raised.value)
    assert str(path) in said and "\n" not in said
    assert "resume from an older checkpoint, or copy this one again" in said
    if kind in ("missing", "truncated"):
        assert file.name in said
    assert all(torch.equal(before[name], p) for name, p in compiled.parameters.items())


def test_another_model_optimizer_or_batch_is_refused(
    trained: tuple[ParallelModel, Path],
    deep_plan: Callable[..., Path],
    tiny_plan: Callable[..., Path],
    alone: Rank,
) -> None:
    _, path = trained
    with pytest.raises(InputError, match=r"another model: .* is \[96\] there and \[48\] in"):
        Checkpointer(compiled_alone(deep_plan("other"), alone), None).load(path)
    with pytest.raises(
        InputError, match=r"with global_batch 8, but the plan says 16; .*init-from"
    ):
        Checkpointer(compiled_alone(tiny_plan("larger", global_batch=16), alone), None).load(path)
    same = compiled_alone(tiny_plan("sgd"), alone)
    same.optimizer = torch.optim.SGD(same.trainable(), lr=0.1)
    with pytest.raises(InputError, match="optimizer AdamW, but the plan trains with SGD"):
        Checkpointer(same, None).load(path)


def test_what_cannot_be_written_leaves_the_state_and_the_older_ones(
    trained: tuple[ParallelModel, Path],
) -> None:
    compiled, path = trained
    before = {name: p.detach().clone() for name, p in compiled.parameters.items()}
    checkpointer = Checkpointer(compiled, path.parent, keep=1)
    # Files beyond 100 kB cannot be written, as on a full disk.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        checkpointer.save(2)
        said = checkpointer.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert said.startswith("the checkpoint of step 2 is not written to ") and "\n" not in said
    assert "File too large" in said
    assert list(path.parent.iterdir()) == checkpoints_in(path.parent) == [path]
    assert all(torch.equal(before[name], p) for name, p in compiled.parameters.items())
    checkpointer.save(3)
    assert checkpointer.finish() == ""
    assert [found.name for found in checkpoints_in(path.parent)] == ["step-00000003"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 100 kB; skips where nobody may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no small file system can be mounted here: {error}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_told_with_what_is_needed(
    trained: tuple[ParallelModel, Path], small_disk: Path
) -> None:
    compiled, _ = trained
    checkpointer = Checkpointer(compiled, small_disk / "c")
    checkpointer.save(2)
    numbers = sum(p.numel() for p in compiled.trainable())
    said = re.search(r"no space left on (\S+), (\d+) bytes needed", checkpointer.finish())
    assert said is not None and said[1] == str(small_disk / "c")
    # AdamW's two states beside each weight, fp32; a step for each tensor, tables of ends twice.
    assert 12 * numbers <= int(said[2]) < 13 * numbers
    assert list((small_disk / "c").iterdir()) == []


def test_options_that_training_changed_are_kept_and_others_are_the_plans() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.5)
    built = group_numbers(optimizer)
    assert changed_numbers(optimizer, built) == [{}]
    optimizer.param_groups[0]["lr"] = 0.05
    assert changed_numbers(optimizer, built) == [{"lr": 0.05}]


def test_the_first_rank_that_failed_says_why() -> None:
    full = OSError(28, "No space left on device")
    assert why(full) == "No space left on device"
    several = CheckpointException("save", {3: (ValueError("x"), None), 1: (full, None)})
    assert why(several) == "No space left on device (rank 1)"
    assert why(RuntimeError("first\nsecond")) == "RuntimeError: first"
