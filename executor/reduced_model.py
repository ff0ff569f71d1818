"""A model and its plan with fewer blocks, to verify what is too large for one process here.

Repeated blocks are equal in structure, so whatever is wrong with a way of splitting them shows
with two a stage. The model is built without the memory of its parameters, blocks are dropped, and
the rest gets values of its own: they need not be good, only the same everywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn as nn

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.preflight import host_free_bytes
from claw_plan.planner.fake_build import on_registration
from claw_plan.planner.model_source import LoadedModel
from claw_plan.planner.plan import Plan
from claw_plan.planner.plan_stages import expand_names

FP64_BYTES = 8
COPIES_OF_ONE = 5
"""One process holds weights, gradients, two moments and the copy it hands over."""

COPIES_OF_RANKS = 5
"""The ranks together hold that once; what they replicate comes on top."""

INIT_STD = 0.02


def blocks_to_keep(plan: Plan, num_parameters: int) -> int | None:
    """Enough blocks for two a stage where the whole does not fit this host; None if it does.

    Every rank builds the whole model in fp64 before it keeps its part.
    """
    free_bytes = host_free_bytes()
    knobs = plan.knobs()
    copies = COPIES_OF_ONE + knobs.num_devices + COPIES_OF_RANKS * knobs.dp_replicate
    if not free_bytes or num_parameters * FP64_BYTES * copies <= free_bytes:
        return None
    keep = 2 * len(plan.stages)
    return keep if keep < len(plan.blocks) else None


def reduced(plan: Plan, loaded: LoadedModel, keep: int) -> tuple[Plan, LoadedModel]:
    """Plan and model with the first `keep` blocks, cut evenly."""
    kept, dropped = plan.blocks[:keep], plan.blocks[keep:]
    _check_numbered(plan.blocks)

    def make() -> nn.Module:
        with on_registration(_OnMeta()):
            model: nn.Module = loaded.make()
        for name in reversed(dropped):
            parent, _, index = name.rpartition(".")
            del model.get_submodule(parent)[int(index)]  # type: ignore[operator]
        return _with_values(model)

    edges = [len(kept) * stage // len(plan.stages) for stage in range(len(plan.stages) + 1)]
    stages = [
        stage.model_copy(
            update={
                "modules": [
                    *(name for name in expand_names(stage.modules) if name not in plan.blocks),
                    *kept[edges[index] : edges[index + 1]],
                ]
            }
        )
        for index, stage in enumerate(plan.stages)
    ]
    # What was predicted is of the whole; some that were tied are gone.
    smaller = plan.model_copy(
        update={"blocks": kept, "stages": stages, "tied": [], "prediction": None}
    )
    return smaller, dataclasses.replace(loaded, make=make)


def _check_numbered(blocks: Sequence[str]) -> None:
    parents = {name.rpartition(".")[0] for name in blocks}
    numbers = [name.rpartition(".")[2] for name in blocks]
    if len(parents) != 1 or numbers != [str(index) for index in range(len(blocks))]:
        raise ExecutionError(
            f"the model is too large for one process here, and its blocks ({blocks[0]}, "
            f"{blocks[1]}, …) are no list that could be shortened; verify where there is more "
            "memory"
        )


class _OnMeta:
    """A parameter without memory for each that a module is given; a tie stays one parameter."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def __call__(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.is_meta:
            return parameter
        if id(parameter) not in self._known:
            made = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            self._known[id(parameter)] = (parameter, made)
        return self._known[id(parameter)][1]


def _with_values(model: nn.Module) -> nn.Module:
    """Real parameters in place of those on meta: scales of norms about 1, the rest small."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                centre = 1.0 if parameter.ndim == 1 and name == "weight" else 0.0
                value = torch.randn(parameter.shape) * INIT_STD + centre
                value = value.to(parameter.dtype)
                made[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]
    return model
