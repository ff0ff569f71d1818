"""Why a plan may train otherwise than one process: what a look at the model can tell.

Asked only when a comparison has failed. Each reason is tested for, not guessed from names; when
none of them is found, none is given.
"""

from __future__ import annotations

import math

import torch
import torch.nn as nn

from claw_plan.executor.batches import ExampleSource
from claw_plan.executor.reference import batch_for
from claw_plan.executor.whole_model import build_whole, loss_of
from claw_plan.planner.model_source import Batch, LoadedModel
from claw_plan.planner.plan import Plan

Microbatches = list[Batch]


def likely_reason(
    plan: Plan, loaded: LoadedModel, precision: str, difference: float, missing_ranks: int
) -> str:
    """The first reason that shows, or an empty text.

    `missing_ranks` counts ranks that hold the parameter that differs and agree with one process.
    In fp64 it is to be called inside a DoubleMode.
    """
    if not math.isfinite(difference):
        return "training itself overflows: lower the learning rate"
    if missing_ranks:
        return (
            "other ranks that hold it agree, so what this rank did is its own: code that asks "
            "for its rank, or a faulty device"
        )
    model = build_whole(plan, loaded, precision)
    batch = batch_for(ExampleSource(plan, loaded), 0, precision)
    parts = {name: value.split(plan.knobs().microbatch_size) for name, value in batch.items()}
    microbatches = [
        dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)
    ]
    if keeps_state(model, loaded, microbatches):
        return (
            "the model answers otherwise when it sees the same rows again: its forward keeps "
            "state, which every rank has of its own"
        )
    if names := reached_sometimes(model, loaded, microbatches):
        return (
            f"some rows never reach {names[0]}: a branch in the model's forward, and ranks that "
            "take different ones average with zeros"
        )
    return ""


def keeps_state(model: nn.Module, loaded: LoadedModel, microbatches: Microbatches) -> bool:
    """Whether the loss of the first rows changes once others were seen."""
    call = loss_of(loaded)
    with torch.no_grad():
        first = call(model, microbatches[0])
        for other in microbatches[1:]:
            call(model, other)
        return not torch.equal(call(model, microbatches[0]), first)


def reached_sometimes(
    model: nn.Module, loaded: LoadedModel, microbatches: Microbatches
) -> list[str]:
    """Parameters that get a gradient from some microbatches and none from others."""
    call = loss_of(loaded)
    reached: list[set[str]] = []
    for microbatch in microbatches:
        model.zero_grad()
        call(model, microbatch).backward()
        reached.append({name for name, p in model.named_parameters() if p.grad is not None})
    everywhere = reached[0].intersection(*reached)
    return sorted(reached[0].union(*reached) - everywhere)
