"""The translations of torch functions that change a divided tensor's shape.

Importing this module fills `planner.head_shard.HANDLERS`, as `planner.head_shard_ops` does. Index
of the whole, in reading order: `lead` rows (everything before the divided dimension, times its
pieces), then the divided piece, then the rest. A new shape is allowed when one of its dimensions
begins where the divided piece begins and is divisible by the degree: the rank's elements are then
the same in both shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from claw_plan.planner.head_shard import Arguments, HeadShard, handles

Function = Callable[..., Any]


def _sizes(arguments: Arguments, name: str, first: int = 1) -> list[int]:
    """Sizes given one by one or as one sequence."""
    given = arguments.args[first:] or [arguments.kwargs.get(name)]
    if len(given) == 1 and isinstance(given[0], list | tuple | torch.Size):
        given = list(given[0])
    if not all(isinstance(size, int) for size in given):
        raise arguments.refused("is given no sizes")
    return list(given)


def reshaped(shard: HeadShard, sizes: Sequence[int], arguments: Arguments) -> HeadShard:
    """The shard in another shape of the whole; -1 is worked out from the whole."""
    sizes, layout = list(sizes), shard.divided
    if -1 in sizes:
        known = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = shard.numel() // max(known, 1)
    if math.prod(sizes) != shard.numel():
        raise arguments.refused(f"asks for the shape {sizes}")
    lead = math.prod(shard.shape[: layout.dim]) * layout.parts
    before, dim = 1, 0
    while dim < len(sizes) - 1 and before * sizes[dim] <= lead:
        before, dim = before * sizes[dim], dim + 1
    parts, rest = divmod(lead, before)
    degree = layout.division.degree
    if layout.extent is not None and not rest and sizes[dim] == layout.extent:
        sizes[dim] = shard.local.shape[layout.dim]
        return HeadShard(shard.local.reshape(sizes), replace(layout, dim=dim))
    if rest or layout.extent is not None or sizes[dim] % (parts * degree):
        raise arguments.refused(
            f"asks for the shape {sizes}, in which no dimension can be divided by {degree} at "
            "the place where the tensor is divided"
        )
    sizes[dim] //= degree
    return HeadShard(shard.local.reshape(sizes), replace(layout, dim=dim, parts=parts))


@handles("view reshape")
def _view(func: Function, arguments: Arguments) -> HeadShard:
    name = "size" if arguments.name == "view" else "shape"
    return reshaped(arguments.subject(), _sizes(arguments, name), arguments)


@handles("view_as reshape_as")
def _view_as(func: Function, arguments: Arguments) -> Any:
    first, other = arguments.args
    if not isinstance(first, HeadShard):
        return func(first, torch.empty(other.shape, device="meta"))
    return reshaped(first, list(other.shape), arguments)


@handles("flatten")
def _flatten(func: Function, arguments: Arguments) -> HeadShard:
    shard = arguments.subject()
    start = arguments.get(1, "start_dim", 0) % shard.ndim
    end = arguments.get(2, "end_dim", -1) % shard.ndim
    shape = list(shard.shape)
    return reshaped(
        shard, [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]], arguments
    )


@handles("unflatten")
def _unflatten(func: Function, arguments: Arguments) -> HeadShard:
    shard = arguments.subject()
    dim = arguments.get(1, "dim") % shard.ndim
    sizes, shape = list(arguments.get(2, "sizes")), list(shard.shape)
    if -1 in sizes:
        sizes[sizes.index(-1)] = shape[dim] // -math.prod(sizes)
    return reshaped(shard, [*shape[:dim], *sizes, *shape[dim + 1 :]], arguments)


@handles("squeeze")
def _squeeze(func: Function, arguments: Arguments) -> HeadShard:
    shard = arguments.subject()
    dims = arguments.get(1, "dim", list(range(shard.ndim)))
    dims = {dim % shard.ndim for dim in (dims if isinstance(dims, list | tuple) else [dims])}
    kept = [size for i, size in enumerate(shard.shape) if size != 1 or i not in dims]
    return reshaped(shard, kept, arguments)


@handles("unsqueeze")
def _unsqueeze(func: Function, arguments: Arguments) -> HeadShard:
    shard = arguments.subject()
    dim = arguments.get(1, "dim") % (shard.ndim + 1)
    after = shard.divided.dim + (dim <= shard.divided.dim)
    return HeadShard(arguments.call(func), replace(shard.divided, dim=after))


@handles("transpose transpose_ swapaxes swapdims t T mT")
def _transpose(func: Function, arguments: Arguments) -> HeadShard:
    shard = arguments.subject()
    if arguments.name in ("t", "T", "mT"):
        if arguments.name != "mT" and shard.ndim != 2:
            raise arguments.refused("reverses more than two dimensions")
        first, second = shard.ndim - 2, shard.ndim - 1
    else:
        first, second = (
            (arguments.get(i, f"dim{i - 1}", arguments.kwargs.get(f"axis{i - 1}"))) % shard.ndim
            for i in (1, 2)
        )
    dim = {first: second, second: first}.get(shard.divided.dim, shard.divided.dim)
    return HeadShard(shard.local.transpose(first, second), replace(shard.divided, dim=dim))


@handles("permute")
def _permute(func: Function, arguments: Arguments) -> HeadShard:
    shard = arguments.subject()
    order = [dim % shard.ndim for dim in _sizes(arguments, "dims")]
    return HeadShard(
        shard.local.permute(order), replace(shard.divided, dim=order.index(shard.divided.dim))
    )


@handles("movedim moveaxis")
def _movedim(func: Function, arguments: Arguments) -> HeadShard:
    shard = arguments.subject()
    source, target = arguments.get(1, "source"), arguments.get(2, "destination")
    if not isinstance(source, int) or not isinstance(target, int):
        raise arguments.refused("moves several dimensions")
    order = [dim for dim in range(shard.ndim) if dim != source % shard.ndim]
    order.insert(target % shard.ndim, source % shard.ndim)
    return HeadShard(
        shard.local.permute(order), replace(shard.divided, dim=order.index(shard.divided.dim))
    )


@handles("expand expand_as")
def _expand(func: Function, arguments: Arguments) -> Any:
    first = arguments.args[0]
    if not isinstance(first, HeadShard):
        return first.expand(arguments.args[1].shape)
    if arguments.name == "expand_as":
        sizes = list(arguments.args[1].shape)
    else:
        sizes = _sizes(arguments, "size")
    dim = first.divided.dim + len(sizes) - first.ndim
    if sizes[dim] not in (-1, first.shape[first.divided.dim]):
        raise arguments.refused("expands the divided dimension")
    sizes[dim] = -1
    return HeadShard(first.local.expand(sizes), replace(first.divided, dim=dim))


@handles("repeat")
def _repeat(func: Function, arguments: Arguments) -> HeadShard:
    shard = arguments.subject()
    times = _sizes(arguments, "repeats")
    dim = shard.divided.dim + len(times) - shard.ndim
    return HeadShard(
        shard.local.repeat(times),
        replace(shard.divided, dim=dim, parts=shard.divided.parts * times[dim]),
    )


@handles("repeat_interleave")
def _repeat_interleave(func: Function, arguments: Arguments) -> HeadShard:
    """Repeats of one divided head stay with it, so that its rank keeps them all."""
    shard = arguments.subject()
    times, dim = arguments.get(1, "repeats"), arguments.get(2, "dim")
    if not isinstance(times, int) or dim is None:
        raise arguments.refused("repeats by a tensor or over all dimensions")
    return HeadShard(arguments.call(func), shard.divided)
