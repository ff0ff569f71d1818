"""The model that bench/kill.py trains: blocks with dropout, on samples that have numbers.

Where SEEN names a folder every process notes there which samples its forwards saw, so that a lost
or repeated one shows. A batch takes PAUSE seconds to read, so that a run lasts long enough to be
killed in the middle of it. `train_data` yields three samples a time: batches begin inside them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as functional

WIDTH = 128
EXAMPLES_FROM = 10**6
"""Numbers of example batches, which planning and cutting look at: no training."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(functional.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        note(number)
        hidden = self.enter(x)
        for block in self.blocks:
            hidden = block(hidden)
        return functional.mse_loss(self.leave(hidden).squeeze(-1), y)


def note(number: torch.Tensor) -> None:
    """One write for a forward: a kill leaves no half line that the next one would add to."""
    if "SEEN" in os.environ and type(number) is torch.Tensor:  # fake tensors have no values
        lines = "".join(f"{one}\n" for one in number.tolist())
        with (Path(os.environ["SEEN"]) / f"{os.getpid()}").open("a") as file:
            file.write(lines)


def build_model() -> nn.Module:
    return Model()


def example_batch(batch_size: int) -> dict[str, torch.Tensor]:
    batch = samples(batch_size)
    return batch | {"number": torch.arange(batch_size) + EXAMPLES_FROM}


def samples(count: int) -> dict[str, torch.Tensor]:
    x = torch.randn(count, 8)
    return {"x": x, "y": x.square().sum(-1)}


def train_data(rank: int, world_size: int) -> Iterator[dict[str, torch.Tensor]]:
    for first in range(0, EXAMPLES_FROM, 3):
        time.sleep(float(os.environ.get("PAUSE", "0")))
        yield samples(3) | {"number": torch.arange(first, first + 3)}
