"""Overlapping steps are the delayed recursion of one process, bit by bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from claw_plan.planner.schedules import ASYNCHRONOUS
from claw_plan.planner.supported import COMPOSITIONS

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("rank_overlapping.py")

MODEL = """
import torch
import torch.nn as nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(6, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList(Block(16) for _ in range(6))

    def forward(self, x, y):
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return (self.head(hidden) - y).square().mean()


def build_model():
    return Chain()


def example_batch(batch_size):
    return {"x": torch.randn(batch_size, 6), "y": torch.randn(batch_size, 1)}
"""

SGD = {"training": {"optimizer": "sgd", "learning_rate": 0.05}}
CLIPS = {"training": {"clip_norm": 0.1}}
FP32, FP64, BF16 = ({"precision": name} for name in ("float32", "float64", "bfloat16"))

EXACT: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "pp2": (
        {"pp": 2},
        [FP32, FP64 | SGD, FP32 | {"drains": [0, 2]}, FP64 | {"saves": 2}, {"schedules": True}],
    ),
    "pp2_deep": ({"pp": 2, "microbatch_size": 1, "recompute": "full"}, [FP32, FP64 | SGD]),
    "pp2_host": ({"pp": 2, "offload": "optimizer"}, [FP32]),
    "pp2_bf16": ({"pp": 2, "precision": "bfloat16"}, [BF16, BF16 | SGD, BF16 | {"saves": 2}]),
    "pp3": ({"pp": 3, "global_batch": 6, "microbatch_size": 2}, [FP32, FP64 | {"drains": [1]}]),
    "pp4": ({"pp": 4}, [FP32, FP64 | SGD, FP32 | {"saves": 1}]),
    "pp2_dp2": ({"pp": 2, "dp_replicate": 2, "global_batch": 16}, [FP32, FP64 | SGD]),
}
"""Knobs of plans of the chain above, and ways of training them."""

CLOSE: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "gpt_pp2": ({"pp": 2}, [FP64, FP64 | CLIPS, FP64 | CLIPS | {"drains": [1]}]),
    "gpt_pp4": ({"pp": 4}, [FP64 | CLIPS, FP64 | CLIPS | {"saves": 1}]),
    "gpt_pp2_tp2": ({"pp": 2, "tp": 2}, [FP64, FP64 | CLIPS]),
    "gpt_pp2_tp2_sp": ({"pp": 2, "tp": 2, "sequence_parallel": True}, [FP64]),
    "gpt_pp2_dp2_tp2": (
        {"pp": 2, "dp_replicate": 2, "tp": 2, "sequence_parallel": True, "global_batch": 16},
        [FP64, FP64 | CLIPS],
    ),
    "gpt_pp2_dp2": ({"pp": 2, "dp_replicate": 2, "global_batch": 16}, [FP64 | CLIPS]),
}
"""A GPT with tied ends, where sums are in another order than in one process."""

Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory,
    write_any: Callable[..., Path],
    deep_plan: Callable[..., Path],
) -> Found:
    """By plan what each way of training it came to; one set of processes for a size."""
    folder = tmp_path_factory.mktemp("overlapping")
    model = folder / "chain.py"
    model.write_text(MODEL)
    blocks = [f"blocks.{index}" for index in range(6)]
    jobs: dict[int, list[dict[str, Any]]] = {}
    for name, (knobs, ways) in (EXACT | CLOSE).items():
        knobs = {"schedule": "PipeDream2BW", "microbatch_size": 2, "global_batch": 8} | knobs
        is_chain = name in EXACT
        path = write_any(model, name, blocks, **knobs) if is_chain else deep_plan(name, **knobs)
        size = knobs["pp"] * knobs.get("dp_replicate", 1) * knobs.get("tp", 1)
        jobs.setdefault(size, []).extend(
            FP32 | {"plan": str(path), "name": name, "steps": 5} | way for way in ways
        )
    results: Found = {}
    for size, own in jobs.items():
        own_folder = folder / str(size)
        own_folder.mkdir()
        (own_folder / "jobs.json").write_text(json.dumps(own))
        for job, result in zip(own, _started(size, own_folder), strict=True):
            results.setdefault(job["name"], []).append(job | result)
    return results


def _started(size: int, folder: Path) -> list[dict[str, Any]]:
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(size), str(folder)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]
    assert [rank.wait(timeout=280) for rank in ranks] == [0] * size
    results: list[dict[str, Any]] = json.loads((folder / "found.json").read_text())
    return results


@pytest.mark.parametrize("name", EXACT)
def test_weights_and_losses_are_those_of_the_delayed_recursion_bit_by_bit(
    name: str, found: Found
) -> None:
    for result in found[name]:
        assert result["updates"] == list(range(5))
        assert result["differences"] == [[0.0] * 5] * len(result["differences"]), result
        # Losses are added up in another order than their mean.
        assert max(map(abs, result["losses"])) < 1e-14, result


@pytest.mark.parametrize("name", CLOSE)
def test_tied_ends_clipping_and_divided_weights_come_to_it_but_for_rounding(
    name: str, found: Found
) -> None:
    for result in found[name]:
        worst = max(max(own) for own in result["differences"])
        assert worst < 1e-10, result
        assert max(map(abs, result["losses"])) < 1e-12, result


def test_what_is_offered_is_what_is_proven_here() -> None:
    proven = {
        frozenset(name for name in ("pp", "tp", "dp_replicate") if knobs.get(name, 1) > 1)
        for knobs, _ in (EXACT | CLOSE).values()
    }
    offered = {known.axes for known in COMPOSITIONS if known.schedules & set(ASYNCHRONOUS)}
    assert offered == proven
