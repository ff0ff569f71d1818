from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn as nn

from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.optimizer import make_optimizer


def test_the_plan_names_the_optimizer_and_its_rate(tiny_plan: Callable[..., Path]) -> None:
    plan, loaded = open_plan(tiny_plan("named"))
    parameters = [nn.Parameter(torch.ones(1))]
    adamw = make_optimizer(plan.training, loaded, parameters)
    assert isinstance(adamw, torch.optim.AdamW)
    assert adamw.param_groups[0]["lr"] == 1e-3
    sgd = plan.training.model_copy(update={"optimizer": "sgd"})
    assert isinstance(make_optimizer(sgd, loaded, parameters), torch.optim.SGD)


def test_the_model_files_own_comes_first(tiny_plan: Callable[..., Path]) -> None:
    plan, loaded = open_plan(tiny_plan("own"))
    loaded = dataclasses.replace(loaded, optimizer=torch.optim.Adagrad)
    parameters = [nn.Parameter(torch.ones(1))]
    assert isinstance(make_optimizer(plan.training, loaded, parameters), torch.optim.Adagrad)
