"""The model of a plan before anything is divided: built, named, called.

Every way of training starts from the same weights, and the comparison with one process from the
same call: what both need stands here.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
import torch.nn as nn

from claw_plan.executor.double_mode import drawn_as_outside
from claw_plan.executor.stages import LossOf
from claw_plan.planner.model_source import Batch, LoadedModel
from claw_plan.planner.plan import Plan

AS_PLANNED, SINGLE, DOUBLE = "as planned", "float32", "float64"
"""The precision to run in. The last two keep the plan's wrapping and leave its precision, to tell
rounding from mistakes."""


def build_whole(plan: Plan, loaded: LoadedModel, precision: str = AS_PLANNED) -> nn.Module:
    """The whole model on the CPU with the weights of the plan's seed, in fp32 or fp64."""
    torch.manual_seed(plan.training.seed)
    with drawn_as_outside():
        model = loaded.build()
    return model.double() if precision == DOUBLE else model.float()


def first_names(model: nn.Module) -> dict[str, str]:
    """Every parameter name to the first name of the same parameter."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def loss_of(loaded: LoadedModel) -> LossOf:
    """Calls a model of that source on a batch and finds the loss."""
    # To read a signature takes as long as many a kernel, and it is the same for every microbatch.
    taken: WeakKeyDictionary[nn.Module, tuple[frozenset[str], list[str]]] = WeakKeyDictionary()

    def call(model: nn.Module, batch: Batch) -> torch.Tensor:
        given, names = taken.get(model, (frozenset(), []))
        if given != batch.keys():
            names = list(loaded.inputs_of(model, batch))
            taken[model] = frozenset(batch), names
        return loaded.loss(model(**{name: batch[name] for name in names}), batch)

    return call


def cast_floats(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with its floating-point tensors in another precision."""
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
