from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.loss_scale import FLOOR, START, LossScale
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import compile_plan
from claw_plan.executor.ranks import Rank


def weight(gradient: float) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.tensor([gradient])
    return parameter


def test_gradients_are_those_of_the_loss_again(alone: Rank) -> None:
    parameter = weight(3 * START)
    assert LossScale(2000).divide([parameter])
    assert parameter.grad is not None and parameter.grad.item() == 3.0


def test_an_overflow_leaves_the_step_out_and_halves_the_scale(alone: Rank) -> None:
    scale = LossScale(2000)
    assert not scale.divide([weight(1.0), weight(float("inf"))])
    assert scale.factor == START / 2


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_step_by_step_as_torchs_scaler(alone: Rank, overflows: list[bool], window: int) -> None:
    ours = LossScale(window)
    theirs = torch.amp.GradScaler("cpu", init_scale=START, growth_interval=window)
    for overflow in overflows:
        value = float("inf") if overflow else 2.0
        parameter = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        theirs.scale(parameter.sum())  # makes its state
        parameter.grad = torch.tensor([value * theirs.get_scale()])
        theirs.step(optimizer)
        theirs.update()
        if overflow and ours.factor <= FLOOR:
            return
        assert ours.divide([weight(value * ours.factor)]) == (not overflow)
        assert ours.factor == theirs.get_scale()
        assert (parameter.item() == 1.0) == overflow


def test_at_its_floor_an_overflow_ends_the_training(alone: Rank) -> None:
    scale = LossScale(2000)
    for _ in range(16):  # from 2 to the 16th down to 1
        assert not scale.divide([weight(float("nan"))])
    with pytest.raises(ExecutionError, match=r"scale down at 1, .* --precision bf16"):
        scale.divide([weight(float("nan"))])


WORKER = """
import json, os, sys, torch, torch.distributed as dist
from claw_plan.executor.loss_scale import LossScale
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
scale, seen = LossScale(2), []
for overflows in (None, 1, None, 0, None, None):
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.tensor([float("inf") if overflows == rank else 1.0])
    seen.append((scale.divide([parameter]), scale.factor))
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump(seen, file)
dist.barrier()
os._exit(0)
"""


@pytest.mark.slow
def test_an_overflow_on_one_rank_leaves_the_step_out_on_all(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    command = [sys.executable, str(tmp_path / "worker.py")]
    processes = [subprocess.Popen([*command, rank, str(tmp_path)]) for rank in "01"]
    assert [process.wait(120) for process in processes] == [0, 0]
    half = START / 2
    expected = [
        [True, START], [False, half], [True, half], [False, half / 2], [True, half / 2],
        [True, half],
    ]  # fmt: skip
    for rank in "01":
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == expected


def test_fp16_trains(tiny_plan: Callable[..., Path], alone: Rank) -> None:
    plan, loaded = open_plan(tiny_plan("fp16", precision="float16"))
    model = compile_plan(plan, loaded, torch.device("cpu"))
    batch = loaded.example_batch(8)
    losses = [model.train_step(batch) for _ in range(8)]
    assert losses[-1] < losses[0]
    assert all(bool(p.isfinite().all()) for p in model.trainable())
