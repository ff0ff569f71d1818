"""The pipeline stages of an exported script: how the user's model is cut, in plain Python.

Blocks that hand one hidden state from one to the next can be cut by a few small stand-in modules
(the same idea as `stages`, without its generality); what needs more is refused by name.
"""

from __future__ import annotations

import inspect
from string import Template
from typing import Any

import torch
import torch.nn as nn

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.recording import Recording, record
from claw_plan.executor.whole_model import first_names, loss_of
from claw_plan.planner.model_source import Batch, LoadedModel
from claw_plan.planner.plan import Plan
from claw_plan.planner.plan_stages import stage_spans
from claw_plan.planner.schedules import schedule_of


def pipeline_text(plan: Plan, loaded: LoadedModel, module: nn.Module, batch: Batch) -> str:
    """Everything of the script that makes and runs stages.

    Raises ExecutionError for a model that the plain stand-ins cannot cut.
    """
    call = loss_of(loaded)
    recording = record(module, plan.blocks, lambda model: call(model, batch))
    spans = stage_spans(plan)
    for start, _ in spans[1:]:
        _check_cut(recording, start)
    outside = _outside(recording, spans)
    return _STAGES.substitute(
        SPANS=_lines([f"({start}, {end})," for start, end in spans]),
        OUTSIDE=_lines([f'"{name}": ({held}, {shape}),' for name, held, shape in outside]),
        HIDDEN=_hidden_name(module.get_submodule(plan.blocks[0])),
        SCHEDULE="Schedule" + plan.schedule.name,
        COUNT=plan.schedule.num_microbatches,
        STAGES=_stages_of_rank(plan),
        ONE_OR_ALL="stages[0]" if plan.schedule.name in ("GPipe", "1F1B") else "stages",
        TIED_CONSTANT=_tied_constant(plan, module, spans, outside),
    )


def has_tied(text: str) -> bool:
    """Whether gradients of tied parameters must be summed."""
    return "\nTIED = " in text


def _check_cut(recording: Recording, cut: int) -> None:
    crossing = recording.crossing(cut)
    name = recording.blocks[cut - 1]
    if len(crossing) > 1:
        raise _refused(f"{crossing[1]}'s result is read by later blocks, too")
    if not isinstance(recording.outputs[name], torch.Tensor):
        kind = type(recording.outputs[name]).__name__
        raise _refused(f"the block {name} returns a {kind}, not one tensor")


def _refused(why: str) -> ExecutionError:
    return ExecutionError(
        f"export: {why}, so plain stand-ins cannot cut the model into stages; plan again with "
        "--fix pp=1, or use `from claw_plan.executor import parallelize`"
    )


Outside = list[tuple[str, list[int], list[int]]]
"""Modules beside the blocks: name, the stages that hold it, the shape of its result."""


def _outside(recording: Recording, spans: list[tuple[int, int]]) -> Outside:
    count = len(recording.blocks)
    found: Outside = []
    for name, gaps in recording.gaps.items():
        held = [
            index
            for index, (start, end) in enumerate(spans)
            if any(start <= gap < end or gap == end == count for gap in gaps)
        ]
        result: Any = recording.outputs[name]
        if not isinstance(result, torch.Tensor):
            raise _refused(f"{name} returns a {type(result).__name__}, not one tensor")
        found.append((name, held, list(result.shape)))
    return found


def _hidden_name(block: nn.Module) -> str:
    """What the blocks call their first argument: models may pass it by name."""
    return next(iter(inspect.signature(block.forward).parameters))


def _stages_of_rank(plan: Plan) -> str:
    if plan.schedule.stages_per_rank == 1:
        return "[rank]"
    if schedule_of(plan.schedule.name).places_v:
        return f"[rank, {2 * plan.knobs().pp - 1} - rank]  # there and back again"
    return f"list(range(rank, {len(stage_spans(plan))}, {plan.knobs().pp}))"


def _tied_constant(
    plan: Plan, module: nn.Module, spans: list[tuple[int, int]], outside: Outside
) -> str:
    """The names of a parameter that several stages hold, by stage; empty without one."""
    holders: dict[str, dict[int, str]] = {}
    for name, first in first_names(module).items():
        for stage in _stages_holding(name, plan, spans, outside):
            holders.setdefault(first, {}).setdefault(stage, name)
    tied = [stages for stages in holders.values() if len(stages) > 1]
    if not tied:
        return ""
    ranks = plan.knobs().pp
    if schedule_of(plan.schedule.name).places_v:
        raise _refused(f"{next(iter(tied[0].values()))} is tied between two stages of one rank")
    lines = [
        "{" + ", ".join(f'{s}: "{name}"' for s, name in stages.items()) + "}," for stages in tied
    ]
    return (
        "\n# One parameter under several names, by stage; stage s is rank s % "
        f"{ranks}'s. Its gradient is the sum.\nTIED = [{_lines(lines)}]\n"
    )


def _stages_holding(
    parameter: str, plan: Plan, spans: list[tuple[int, int]], outside: Outside
) -> list[int]:
    for name, held, _ in outside:
        if parameter.rpartition(".")[0] == name:
            return held
    return [
        index
        for index, (start, end) in enumerate(spans)
        if any(parameter.startswith(block + ".") for block in plan.blocks[start:end])
    ]


def _lines(entries: list[str]) -> str:
    return "\n    " + "\n    ".join(entries) + "\n"


_STAGES = Template('''
# Stage s holds the blocks [start, end).
SPANS = [$SPANS]
# Modules beside the blocks: the stages that hold them, and the shape of what they return.
OUTSIDE = {$OUTSIDE}
NUM_MICROBATCHES = $COUNT
$TIED_CONSTANT

class StageDone(BaseException):
    """Leaves the model's forward where the next stage begins, with the hidden state to send."""


class NextStage(nn.Module):
    """Stands where the next stage's first block was."""

    def forward(self, $HIDDEN, *args, **kwargs):
        raise StageDone($HIDDEN)


class EarlierBlock(nn.Module):
    """Stands for a block of an earlier stage; the last of them answers with what was sent."""

    received = None

    def forward(self, $HIDDEN, *args, **kwargs):
        return $HIDDEN if self.received is None else self.received


class Elsewhere(nn.Module):
    """Stands for another module that other stages hold: something of the right shape."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape

    def forward(self, *args, **kwargs):
        return torch.zeros(self.shape, dtype=DTYPE, device=DEVICE)


class Stage(nn.Module):
    """One stage: the whole model's code, the weights of its own blocks only."""

    def __init__(self, model, index):
        super().__init__()
        self.model, self.index = model, index
        start, end = SPANS[index]
        for name, (stages, shape) in OUTSIDE.items():
            if index not in stages:
                model.set_submodule(name, Elsewhere(shape))
        self.blocks = BLOCKS[start:end]
        self.entry = BLOCKS[start - 1] if start else None
        for name in BLOCKS[:start]:
            model.set_submodule(name, EarlierBlock())
        for name in BLOCKS[end:]:
            model.set_submodule(name, NextStage())

    def forward(self, *received, **batch):
        if self.entry is not None:
            self.model.get_submodule(self.entry).received = received[0]
        try:
            return loss_of(self.model, batch)
        except StageDone as done:
            return done.args[0].contiguous()


def make_schedule(parts, mesh):
    """The stages of this rank under the plan's schedule."""
    rank, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    stages = [
        PipelineStage(part, index, len(SPANS), DEVICE, group=group)
        for part, index in zip(parts, stages_of(rank), strict=True)
    ]
    return $SCHEDULE(
        $ONE_OR_ALL,
        NUM_MICROBATCHES,
        # Each microbatch adds its share of the mean; the runtime must not divide once more.
        loss_fn=lambda loss, target: loss / NUM_MICROBATCHES,
        scale_grads=False,
    )


def stages_of(rank):
    """The stages that a rank of the pipeline runs."""
    return $STAGES
''')
