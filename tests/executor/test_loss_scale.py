from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn as nn

from claw_plan.executor.loss_scale import GROWTH_STEPS, START, LossScale
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import compile_plan
from claw_plan.executor.ranks import Rank


def weight(gradient: float) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.tensor([gradient])
    return parameter


def test_gradients_are_those_of_the_loss_again(alone: Rank) -> None:
    parameter = weight(3 * START)
    assert LossScale().divide([parameter])
    assert parameter.grad is not None and parameter.grad.item() == 3.0


def test_an_overflow_leaves_the_step_out_and_halves_the_scale(alone: Rank) -> None:
    scale = LossScale()
    assert not scale.divide([weight(1.0), weight(float("inf"))])
    assert scale.factor == START / 2


def test_many_good_steps_double_it(alone: Rank) -> None:
    scale = LossScale()
    for _ in range(GROWTH_STEPS):
        assert scale.divide([weight(1.0)])
    assert scale.factor == 2 * START


def test_fp16_trains(tiny_plan: Callable[..., Path], alone: Rank) -> None:
    plan, loaded = open_plan(tiny_plan("fp16", precision="float16"))
    model = compile_plan(plan, loaded, torch.device("cpu"))
    batch = loaded.example_batch(8)
    losses = [model.train_step(batch) for _ in range(8)]
    assert losses[-1] < losses[0]
    assert all(bool(p.isfinite().all()) for p in model.trainable())
