"""The optimizer of a plan, the same for every way of splitting."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from claw_plan.executor.optimizers.lamb import Lamb
from claw_plan.planner.model_source import LoadedModel
from claw_plan.planner.plan import PlanTraining


def make_optimizer(
    training: PlanTraining, loaded: LoadedModel, parameters: Sequence[nn.Parameter]
) -> torch.optim.Optimizer:
    """The model file's own `optimizer(params)` if it has one, else what the plan names.

    A rank that holds both sharded and whole parameters cannot update them in one fused call.
    """
    if loaded.optimizer is not None:
        return loaded.optimizer(iter(parameters))
    if training.optimizer == "lamb":
        return Lamb(parameters, lr=training.learning_rate)
    kinds = {isinstance(parameter, DTensor) for parameter in parameters}
    foreach = False if len(kinds) > 1 else None
    if training.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=training.learning_rate, foreach=foreach)
    return torch.optim.AdamW(parameters, lr=training.learning_rate, foreach=foreach)
