"""What a divided sequence has and divided heads have not: losses, means, single positions.

These translations stand before those of all divided tensors (`planner.head_shard_ops`). What would
need other ranks' tokens in any other way is refused by name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from claw_plan.planner.context_parallel_division import (
    Function,
    SequenceDivision,
    division_of,
    handles,
)
from claw_plan.planner.context_parallel_ranks import total
from claw_plan.planner.head_shard import HANDLERS, Arguments, HeadShard, Layout


@handles("addmm")
def _addmm(func: Function, arguments: Arguments) -> HeadShard:
    """A bias and rows times a weight, as transformers' Conv1D has it."""
    bias, rows = arguments.args[:2]
    if not isinstance(rows, HeadShard) or len(arguments.shards()) > 1 or rows.divided.dim != 0:
        raise arguments.refused("sums over positions")
    if bias.ndim > 1 and bias.shape[0] != 1:
        raise arguments.refused("adds a matrix of all positions")
    return HeadShard(arguments.call(func), rows.divided)


# Over all positions.


@handles("sum mean")
def _reduction(func: Function, arguments: Arguments) -> Any:
    """Each rank adds its own positions, then the ranks add up."""
    shard = arguments.subject()
    dims = arguments.get(1, "dim")
    listed = list(range(shard.ndim)) if dims is None else dims
    listed = [d % shard.ndim for d in (listed if isinstance(listed, list | tuple) else [listed])]
    if shard.divided.dim not in listed:
        return HANDLERS[arguments.name](func, arguments)
    local = total(arguments.call(func), division_of(shard).context)
    return local / division_of(shard).degree if arguments.name == "mean" else local


@handles("cross_entropy nll_loss")
def _loss(func: Function, arguments: Arguments) -> Any:
    """The mean over all positions that are not ignored, which every rank can count."""
    scores, target = arguments.get(0, "input"), arguments.get(1, "target")
    if not isinstance(scores, HeadShard) or target.is_floating_point():
        raise arguments.refused("is given no classes as targets, or whole scores")
    classes = min(1, scores.ndim - 1)
    if scores.divided.dim == classes:
        raise arguments.refused("runs over classes at the place of positions")
    if arguments.get(3, "size_average") is not None or arguments.get(5, "reduce") is not None:
        raise arguments.refused("is given size_average or reduce, which torch has given up")
    dim = scores.divided.dim - (scores.divided.dim > classes)
    own = _own(target, dim, scores.divided)
    reduction = arguments.get(6, "reduction", "mean")
    arguments.set(1, "target", own)
    arguments.set(6, "reduction", "none" if reduction == "none" else "sum")
    losses = arguments.call(func)
    if reduction == "none":
        return HeadShard(losses, replace(scores.divided, dim=dim))
    summed = total(losses, division_of(scores).context)
    if reduction == "sum":
        return summed
    return summed / _weight_of(target, arguments, division_of(scores))


def _own(tensor: torch.Tensor, dim: int, layout: Layout) -> torch.Tensor:
    if isinstance(tensor, HeadShard):
        return tensor.local
    return layout.division.own_part(tensor, dim, layout.parts)


def _weight_of(
    target: torch.Tensor, arguments: Arguments, division: SequenceDivision
) -> torch.Tensor:
    """What the mean divides by: the targets that count, by the weights of their classes."""
    ignored, weight = arguments.get(4, "ignore_index", -100), arguments.get(2, "weight")
    own = target.local if isinstance(target, HeadShard) else target
    counts = own != ignored
    if weight is None:
        summed = counts.sum()
    else:
        summed = (weight[own.masked_fill(~counts, 0)] * counts).sum()
    return total(summed, division.context) if isinstance(target, HeadShard) else summed


@handles(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits"
)
def _elementwise_loss(func: Function, arguments: Arguments) -> Any:
    """Losses of elements, then their mean or sum over all."""
    scores, target = arguments.get(0, "input"), arguments.get(1, "target")
    if not isinstance(scores, HeadShard) or arguments.kwargs.get("weight") is not None:
        raise arguments.refused("is given whole values, or weights")
    reduction = arguments.kwargs.pop("reduction", "mean")
    arguments.set(1, "target", _own(target, scores.divided.dim, scores.divided))
    arguments.kwargs["reduction"] = "none"
    losses = HeadShard(arguments.call(func), scores.divided)
    return {"mean": losses.mean, "sum": losses.sum}.get(reduction, lambda: losses)()


# Single positions.


@handles("select")
def _select(func: Function, arguments: Arguments) -> Any:
    shard = arguments.subject()
    if arguments.get(1, "dim") % shard.ndim != shard.divided.dim:
        return HANDLERS["select"](func, arguments)
    return _position(shard, arguments.get(2, "index"), shard.divided.dim)


def _position(shard: HeadShard, index: int, dim: int) -> torch.Tensor:
    """One position on all ranks: its holder's, the others add nothing."""
    division, size = division_of(shard), int(shard.shape[dim])
    numbers = division.own_part(
        torch.arange(size, device=shard.local.device), 0, shard.divided.parts
    )
    mine = (numbers == index % size).view(-1, *[1] * (shard.ndim - 1 - dim))
    return total((shard.local * mine).sum(dim), division.context)


@handles("__getitem__")
def _index(func: Function, arguments: Arguments) -> Any:
    """A whole number at the place of positions takes one; runs of positions are refused."""
    shard = arguments.subject()
    index = arguments.args[1]
    index = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [item for item in index if not isinstance(item, torch.Tensor)]:
        place = next(i for i, item in enumerate(index) if item is Ellipsis)
        used = sum(item is not None for item in index) - 1
        index[place : place + 1] = [slice(None)] * (shard.ndim - used)
    taking = [place for place, item in enumerate(index) if item is not None]
    if len(taking) > shard.divided.dim:
        at = taking[shard.divided.dim]
        item = index[at]
        if isinstance(item, int) and not isinstance(item, bool):
            picked = _position(shard, item, shard.divided.dim)
            return func(picked, tuple(index[:at] + index[at + 1 :]))
        if isinstance(item, slice) and item != slice(None):
            bounds = item.indices(int(shard.shape[shard.divided.dim]))
            if bounds != (0, int(shard.shape[shard.divided.dim]), 1):
                raise arguments.refused("takes a run of positions")
    return HANDLERS["__getitem__"](func, arguments)


@handles("split split_with_sizes chunk narrow unbind")
def _runs(func: Function, arguments: Arguments) -> Any:
    """Along other dimensions only."""
    shard = arguments.subject()
    default = 0 if arguments.name == "unbind" else None
    place = 2 if arguments.name in ("split", "split_with_sizes", "chunk") else 1
    dim = arguments.get(place, "dim", default)
    if (0 if dim is None else dim) % shard.ndim == shard.divided.dim:
        raise arguments.refused("takes runs of positions")
    return HANDLERS[arguments.name](func, arguments)


@handles("repeat cat concat concatenate")
def _joins(func: Function, arguments: Arguments) -> Any:
    """Not along the positions: their order would be another."""
    shard = arguments.shards()[0]
    if arguments.name == "repeat":
        times = arguments.args[1:]
        sizes = list(times[0]) if isinstance(times[0], list | tuple | torch.Size) else list(times)
        along = sizes[shard.divided.dim - shard.ndim] != 1
    else:
        along = arguments.get(1, "dim", 0) % shard.ndim == shard.divided.dim
    if along:
        raise arguments.refused("lays positions one after another")
    return HANDLERS[arguments.name](func, arguments)
