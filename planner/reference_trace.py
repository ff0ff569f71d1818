"""From the dimensions of a transformer to the `ModelGraph` of one rank's part of it.

The `ReferenceTransformer` is recorded on meta tensors (which cost a third of what fake ones do) at
two batch sizes with one block of each kind; depth is arithmetic. Sizes of parameters are those of
one rank: the graph is for the division it was traced with and no other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
import torch.nn as nn

from claw_plan.planner.attention_op import fused_operators
from claw_plan.planner.fit import Fit, ProgramChanges
from claw_plan.planner.graph import PLAIN, SEQUENCE, TENSOR, ModelGraph, Parameter, Unit, UnitCost
from claw_plan.planner.recorder import Recorder, Recording
from claw_plan.planner.reference_model import Division, ReferenceTransformer
from claw_plan.planner.subject import cast_parameters
from claw_plan.planner.tp_autograd import StandIn
from claw_plan.profiles.training_row import Dimensions

BATCH_SIZES = (2, 4)
"""Two points of a line. That these operators' costs lie on one is tested, not checked each time;
even, so that tokens divide among experts and ranks."""

MORE_SAMPLES = (16, 32)
"""Where there are fewer tokens than experts, the padding of two samples is not that of four."""

LAUNCHES_PER_OP = 2.0
"""A block has 12 to 14 operators forward here; eager trainers launch 24 to 30 kernels (biases,
dropout, casts, copies)."""

Kind = tuple[int, bool]
"""A kind of block: the window of its attention (0: none) and whether its MLP is dense."""


def trace_reference(dims: Dimensions, division: Division, dtype: str) -> ModelGraph:
    """The graph of one rank for sequences of `dims.seq_len` (a cp-th of each) in `dtype`."""
    kinds = kinds_of_layers(dims)
    distinct = tuple(dict.fromkeys(kinds))
    costs, shapes = _traced(replace(dims, layers=1), division, dtype, distinct)
    structures = [0, *(distinct.index(kind) + 1 for kind in kinds), len(distinct) + 1]
    names = ["prologue", *(f"blocks.{layer}" for layer in range(dims.layers)), "epilogue"]
    units = tuple(
        Unit(name=name, modules=(name,), structure=structure)
        for name, structure in zip(names, structures, strict=True)
    )
    text = repr((dims, division, dtype))
    return ModelGraph(
        name="reference transformer",
        fingerprint=hashlib.sha256(text.encode()).hexdigest()[:16],
        parameters=tuple(_parameters(shapes, structures)),
        buffer_bytes=0,
        units=units,
        costs={variant: costs for variant in (PLAIN, TENSOR, SEQUENCE)},
        tp_divides=division.tp,
        seq_len=dims.seq_len,
        dtype=dtype,
        launches_per_op=LAUNCHES_PER_OP,
    )


def kinds_of_layers(dims: Dimensions) -> list[Kind]:
    """The kind of every layer: windows alternate with full attention, dense layers come first."""
    windowed = dims.sliding_window_layers if dims.sliding_window else 0
    dense = dims.moe.dense_layers if dims.moe else dims.layers
    kinds = []
    for layer in range(dims.layers):
        # Spread evenly: layer i has a window when the count of windows so far must grow.
        has_window = (layer + 1) * windowed // dims.layers > layer * windowed // dims.layers
        kinds.append((dims.sliding_window if has_window else 0, layer < dense))
    return kinds


Shapes = tuple[tuple[str, tuple[int, ...], str, frozenset[int]], ...]
"""Of every parameter: name, shape, dtype and the traced units that use it."""


@lru_cache(maxsize=4096)
def _traced(
    dims: Dimensions, division: Division, dtype: str, kinds: tuple[Kind, ...]
) -> tuple[tuple[UnitCost, ...], Shapes]:
    """The cost of prologue, each kind of block and epilogue; equal ones are traced once."""
    try:
        return _traced_at(BATCH_SIZES, dims, division, dtype, kinds)
    except ProgramChanges:
        return _traced_at(MORE_SAMPLES, dims, division, dtype, kinds)


def _traced_at(
    sizes: Sequence[int],
    dims: Dimensions,
    division: Division,
    dtype: str,
    kinds: tuple[Kind, ...],
) -> tuple[tuple[UnitCost, ...], Shapes]:
    recorder: Recorder

    def told(axis: str) -> StandIn:
        degree = getattr(division, axis)
        return StandIn(
            degree, exchange=lambda op, num, where: recorder.exchange(op, num, where, axis)
        )

    ranks = {axis: told(axis) for axis in ("tp", "cp", "ep")}
    with torch.device("meta"):
        module = ReferenceTransformer(dims, division, ranks, kinds)
    cast_parameters(module, getattr(torch, dtype))
    names = {id(part): name for name, part in module.named_modules()}
    tensors = dict(module.named_parameters())
    recordings: list[Recording] = []
    with fused_operators():
        for size in sizes:
            batch = {
                name: torch.empty(
                    size, dims.seq_len // division.cp, dtype=torch.int64, device="meta"
                )
                for name in ("tokens", "targets")
            }
            recorder = Recorder(names, list(module.blocks), dict(tensors), batch)
            with recorder:
                recorder.backward(module(**batch))
            recordings.append(recorder.recording)
            module.zero_grad(set_to_none=True)
    costs = Fit(sizes).units(recordings, len(kinds) + 2)
    return tuple(costs), _shapes(module, recordings[0])


def _shapes(module: nn.Module, recording: Recording) -> Shapes:
    return tuple(
        (
            name,
            tuple(parameter.shape),
            str(parameter.dtype).removeprefix("torch."),
            frozenset(recording.used.get(name, {0})),
        )
        for name, parameter in module.named_parameters()
    )


def _parameters(shapes: Shapes, structures: Sequence[int]) -> list[Parameter]:
    """Of every layer its own copies of what its kind of block holds."""
    found = []
    for name, shape, dtype, used in shapes:
        head, _, rest = name.partition(".")
        if head != "blocks":
            last = len(structures) - 1
            ends = tuple(sorted({0 if unit == 0 else last for unit in used}))
            found.append(_parameter(name, shape, dtype, ends))
            continue
        kind, _, inner = rest.partition(".")
        for unit, structure in enumerate(structures[1:-1], start=1):
            if structure == int(kind) + 1:
                found.append(_parameter(f"blocks.{unit - 1}.{inner}", shape, dtype, (unit,)))
    return found


def _parameter(name: str, shape: tuple[int, ...], dtype: str, units: tuple[int, ...]) -> Parameter:
    return Parameter(
        names=(name,),
        shape=shape,
        dtype=dtype,
        trainable=True,
        units=units,
        is_expert=len(shape) == 3,  # only experts' matrices are stacked
    )
