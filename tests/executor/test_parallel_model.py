from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import ParallelModel, compile_plan
from claw_plan.executor.ranks import Rank

CPU = torch.device("cpu")


@pytest.fixture
def compiled(tiny_plan: Callable[..., Path], alone: Rank) -> ParallelModel:
    return compile_plan(*open_plan(tiny_plan("compiled")), CPU)


def test_a_step_learns_and_clears_its_gradients(compiled: ParallelModel) -> None:
    batch = {
        "idx": torch.arange(128).view(8, 16) % 61,
        "targets": torch.arange(1, 129).view(8, 16) % 61,
    }
    losses = [compiled.train_step(batch) for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert all(parameter.grad is None for parameter in compiled.trainable())
