"""What a divided dimension becomes under operators that only change shapes.

`view_of` answers for a cut of the input with the cut of each output, or None where the result has
no divided form. The rule for a new shape is that of `head_shard_views`: elements in reading order
are `lead` rows, then the divided piece, then the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from claw_plan.planner.split.graph import FlowOp, SplitGraph
from claw_plan.planner.split.states import State, cut, fits

RESHAPES = frozenset(("view", "_unsafe_view", "reshape", "unflatten", "_reshape_alias"))
PERMUTES = frozenset(("t", "transpose", "permute"))
CUTS = frozenset(("split", "split_with_sizes", "chunk", "slice"))
VIEWS = RESHAPES | PERMUTES | CUTS | frozenset(("unsqueeze", "squeeze", "select", "unbind"))
JOINS = frozenset(("cat", "stack"))
MOST_PIECES = 16
"""Fused weights hold few matrices; a view that begins with more is one of heads."""

Shape = tuple[int, ...]


def short_name(op: FlowOp) -> str:
    """Without the library's name."""
    return op.name.rpartition(".")[2]


def is_view(op: FlowOp) -> bool:
    """Whether the operator takes one tensor and shows it, or parts of it, in another shape."""
    return short_name(op) in VIEWS and len(op.inputs) == 1


def view_of(op: FlowOp, graph: SplitGraph, state: State, degree: int) -> tuple[State, ...] | None:
    """The cut of each output for a cut of the input; None where there is none."""
    shape = graph.tensors[op.inputs[0]].shape
    shapes = [graph.tensors[number].shape for number in op.outputs]
    name = short_name(op)
    if name in RESHAPES:
        found = [reshaped(shape, shapes[0], state)]
    elif name in PERMUTES or name in ("unsqueeze", "squeeze"):
        found = [_moved(op, name, shape, state)]
    else:
        found = _taken(op, name, shape, shapes, state)
    if any(
        new is None or not fits(out, new, degree) for new, out in zip(found, shapes, strict=True)
    ):
        return None
    return tuple(new for new in found if new is not None)


def join_of(op: FlowOp, graph: SplitGraph, states: tuple[State, ...]) -> State | None:
    """The cut of a `cat` or `stack` of tensors that are all cut on the same dimension."""
    dims = {state.dim for state in states}
    if len(dims) > 1:
        return None
    ndim = len(graph.tensors[op.inputs[0]].shape)
    own = dims.pop()
    dim = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)
    if short_name(op) == "stack":
        dim %= ndim + 1
        same = len({state.parts for state in states}) == 1
        return cut(own + (dim <= own), states[0].parts) if same else None
    if dim % ndim != own:
        return states[0] if len({state.parts for state in states}) == 1 else None
    sizes = {
        graph.tensors[number].shape[own] // state.parts
        for number, state in zip(op.inputs, states, strict=True)
    }
    return cut(own, sum(state.parts for state in states)) if len(sizes) == 1 else None


def pieces_of(op: FlowOp, graph: SplitGraph) -> Iterator[int]:
    """How many equal pieces a fused dimension may hold, as far as this operator tells."""
    name = short_name(op)
    if not op.inputs or name not in VIEWS:
        return
    shape = graph.tensors[op.inputs[0]].shape
    if name in RESHAPES:
        made = graph.tensors[op.outputs[0]].shape
        for size in made[:-1]:
            if 1 < size <= MOST_PIECES:
                yield size
    elif name in CUTS:
        for edges in _edges(op, name, shape):
            dim, points = edges
            yield shape[dim] // math.gcd(shape[dim], *points)


def reshaped(shape: Shape, sizes: Shape, state: State) -> State | None:
    """The cut in another shape of the same elements."""
    lead = math.prod(shape[: state.dim]) * state.parts
    before, dim = 1, 0
    while dim < len(sizes) - 1 and before * sizes[dim] <= lead:
        before, dim = before * sizes[dim], dim + 1
    parts, rest = divmod(lead, before)
    if rest or not sizes or sizes[dim] % parts:
        return None
    return cut(dim, parts)


def _moved(op: FlowOp, name: str, shape: Shape, state: State) -> State | None:
    ndim, own = len(shape), state.dim
    if name == "unsqueeze":
        return cut(own + (op.args[1] % (ndim + 1) <= own), state.parts)
    if name == "squeeze":
        gone = _squeezed(op, shape)
        return cut(own - sum(dim < own for dim in gone), state.parts)
    if name == "t":
        order: list[int] = list(reversed(range(ndim)))
    elif name == "transpose":
        order = list(range(ndim))
        one, other = op.args[1] % ndim, op.args[2] % ndim
        order[one], order[other] = other, one
    else:
        order = [dim % ndim for dim in op.args[1]]
    return cut(order.index(own), state.parts)


def _squeezed(op: FlowOp, shape: Shape) -> list[int]:
    dims = op.args[1] if len(op.args) > 1 else range(len(shape))
    dims = (dims,) if isinstance(dims, int) else dims
    return [dim % len(shape) for dim in dims if shape[dim] == 1]


def _taken(
    op: FlowOp, name: str, shape: Shape, shapes: list[Shape], state: State
) -> list[State | None]:
    """select, unbind, slices and splits: whole pieces of the divided dimension only."""
    ndim = len(shape)
    if name in ("select", "unbind"):
        dim = (op.args[1] if len(op.args) > 1 else 0) % ndim
        if dim == state.dim:
            return [None] * len(shapes)
        return [cut(state.dim - (dim < state.dim), state.parts)] * len(shapes)
    dim, points = next(_edges(op, name, shape))
    if dim != state.dim:
        return [state] * len(shapes)
    piece = shape[dim] // state.parts
    found: list[State | None] = []
    for start, stop in pairwise(points):
        whole = start % piece == 0 and stop % piece == 0 and stop > start
        found.append(cut(dim, (stop - start) // piece) if whole else None)
    return found


def _edges(op: FlowOp, name: str, shape: Shape) -> Iterator[tuple[int, list[int]]]:
    """The dimension that is cut and where."""
    ndim = len(shape)

    def argument(index: int, key: str, default: Any) -> Any:
        return op.args[index] if len(op.args) > index else op.kwargs.get(key, default)

    if name == "slice":
        dim = argument(1, "dim", 0) % ndim
        start, stop, step = slice(
            argument(2, "start", None), argument(3, "end", None), argument(4, "step", None)
        ).indices(shape[dim])
        yield dim, [start, stop] if step == 1 else [0, 1]
        return
    dim = argument(2, "dim", 0) % ndim
    sizes = op.args[1]
    if isinstance(sizes, int):
        size = -(-shape[dim] // sizes) if name == "chunk" else sizes
        sizes = [min(size, shape[dim] - at) for at in range(0, shape[dim], size)]
    points = [0]
    for size in sizes:
        points.append(points[-1] + size)
    yield dim, points
