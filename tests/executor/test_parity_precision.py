"""Plans in their own precision: bfloat16 within its rounding, running statistics exactly.

`verify` leaves the plan's precision, to tell rounding from mistakes; here it is kept. A bfloat16
has 8 significant bits: rounding a value moves it by at most u = 2^-8 of it. Llama's loss is
computed in fp32 from scores in bfloat16, so a token's loss moves by at most 2 u |score| for the
two scores in it. Their signs are independent, so over N tokens the mean moves by about
2 u |score| / sqrt(N); with |score| <= 1 (initial weights of 0.02) and N = 128 that is 7e-4.
The norm of the gradients is a sum of squares, in which relative errors u average out too: plans
differ by less than u sqrt(layers) = 1 %, where a forgotten sum over tensor-parallel ranks changes
it by some 10 %.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from claw_plan.executor.batches import ExampleSource
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.reference import reference_steps
from claw_plan.executor.whole_model import SINGLE, build_whole

pytestmark = [pytest.mark.slow, pytest.mark.sweep]

SCRIPT = Path(__file__).parent / "rank_losses.py"
LOSS_BOUND, NORM_BOUND = 1e-3, 1e-2

MODEL = """
import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norms = nn.ModuleList([nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=None)])

    def forward(self, x):
        for block, norm in zip(self.blocks, self.norms):
            x = norm(block(x))
        return (x ** 3).mean()


def build_model():
    return Net()


def example_batch(batch_size, seq_len=None):
    return {"x": torch.randn(batch_size, 4)}
"""

BFLOAT16: dict[str, dict[str, Any]] = {
    "tp sp": {"tp": 2, "sequence_parallel": True},
    "tp": {"tp": 2},
    "zero 1": {"dp_shard": 2, "zero": 1},
    "recompute": {"dp_shard": 2, "recompute": "half"},
}
NORMED: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 2, "microbatch_size": 2},
    "fsdp": {"dp_shard": 2, "microbatch_size": 2, "recompute": "full"},
}

Found = dict[str, dict[str, Any]]


def on_ranks(world_size: int, folder: Path, plans: list[Path]) -> list[dict[str, Any]]:
    commands = [
        [sys.executable, str(SCRIPT), str(rank), str(world_size), str(folder), *map(str, plans)]
        for rank in range(world_size)
    ]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE) for command in commands]
    for process in processes:
        _, errors = process.communicate(timeout=280)
        assert process.returncode == 0, errors.decode()[-2000:]
    found: list[dict[str, Any]] = json.loads((folder / "found.json").read_text())
    return found


@pytest.fixture(scope="module")
def normed_plan(tmp_path_factory: pytest.TempPathFactory, write_any: Callable[..., Path]) -> Any:
    model = tmp_path_factory.mktemp("normed") / "net.py"
    model.write_text(MODEL)
    return lambda name, **knobs: write_any(model, name, ["blocks.0", "blocks.1"], **knobs)


@pytest.fixture(scope="module")
def found(
    config_plan: Callable[..., Path],
    normed_plan: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Found:
    """What one process and two make of the plans."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    lowered = {"precision": "bfloat16"}
    [alone] = on_ranks(1, one, [config_plan("llama", "bf16-one", **lowered)])
    plans = {
        name: config_plan("llama", f"bf16-{index}", **lowered, **knobs)
        for index, (name, knobs) in enumerate(BFLOAT16.items())
    }
    plans |= {name: normed_plan(name, **knobs) for name, knobs in NORMED.items()}
    results = on_ranks(2, two, list(plans.values()))
    return {"one": alone} | dict(zip(plans, results, strict=True))


@pytest.mark.parametrize("name", BFLOAT16)
def test_bfloat16_stays_within_its_rounding(name: str, found: Found) -> None:
    one, many = found["one"], found[name]
    losses = zip(one["losses"], many["losses"], strict=True)
    norms = zip(one["norms"], many["norms"], strict=True)
    assert max(abs(a - b) for a, b in losses) < LOSS_BOUND
    assert max(abs(a / b - 1) for a, b in norms) < NORM_BOUND


@pytest.mark.parametrize("name", NORMED)
def test_running_statistics_are_those_of_one_process(
    name: str, found: Found, normed_plan: Callable[..., Path]
) -> None:
    """With momentum and as a mean over all calls; losses of the steps too."""
    plan, loaded = open_plan(normed_plan("one", microbatch_size=2))
    kept: list[torch.nn.Module] = []

    def build() -> torch.nn.Module:
        kept.append(build_whole(plan, loaded, SINGLE))
        return kept[-1]

    watched = dataclasses.replace(loaded, make=build)
    source = ExampleSource(plan, loaded)
    losses = [loss for loss, _ in reference_steps(plan, watched, source, 5, SINGLE)]
    assert found[name]["losses"] == pytest.approx(losses, abs=1e-5)
    for buffer, value in kept[-1].named_buffers():
        assert found[name]["buffers"][buffer] == pytest.approx(value.tolist(), rel=1e-4, abs=1e-5)
