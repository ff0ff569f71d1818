"""The translations of torch functions to tensors divided along the sequence.

They stand before those of all divided tensors (`planner.head_shard_ops`), for what a sequence has
and heads have not: attention between all positions, losses and means over all of them, single
positions. What would need other ranks' tokens in any other way is refused by name.

Keys and values are gathered where scores are made, or heads are exchanged for positions around
`scaled_dot_product_attention` (DeepSpeed-Ulysses, arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from claw_plan.planner import head_shard_ops, head_shard_views
from claw_plan.planner.candidate import ALL_TO_ALL
from claw_plan.planner.context_parallel_division import SequenceDivision
from claw_plan.planner.context_parallel_ranks import gather, swap, total
from claw_plan.planner.head_shard import (
    HANDLERS,
    Arguments,
    Handler,
    HeadShard,
    Layout,
    whole_operand,
)
from claw_plan.planner.torch_private import attend_to_last

Function = Callable[..., Any]

TRANSLATIONS = (head_shard_ops, head_shard_views)
"""Imported for the translations of all divided tensors."""

SEQUENCE_HANDLERS: dict[str, Handler] = {}


def handles(names: str) -> Callable[[Handler], Handler]:
    """Registers a translation under the names of the functions it is for."""

    def register(handler: Handler) -> Handler:
        SEQUENCE_HANDLERS.update(dict.fromkeys(names.split(), handler))
        return handler

    return register


def _division(shard: HeadShard) -> SequenceDivision:
    division = shard.divided.division
    assert isinstance(division, SequenceDivision)
    return division


def whole(shard: HeadShard) -> torch.Tensor:
    """The tensor of all positions, gathered from all ranks."""
    layout, division = shard.divided, _division(shard)
    return gather(shard.local, layout.dim, division.pieces(layout.parts), division.context)


def _offset(tensor: torch.Tensor) -> int:
    """How far from the right the divided dimension is; 0 where there is none."""
    return tensor.ndim - tensor.divided.dim if isinstance(tensor, HeadShard) else 0


# Attention.


@handles("scaled_dot_product_attention")
def _attention(func: Function, arguments: Arguments) -> Any:
    """Every rank's queries meet the keys and values of all positions."""
    q, k, v = (arguments.get(i, name) for i, name in enumerate(("query", "key", "value")))
    mask = arguments.get(3, "attn_mask")
    if isinstance(mask, HeadShard) and _offset(mask) != 2:
        arguments.set(3, "attn_mask", mask := whole(mask))
    if {_offset(q), _offset(k), _offset(v)} - {0, 2}:
        if _offset(q) >= 3:  # samples or heads are divided, not positions
            return HANDLERS[arguments.name](func, arguments)
        raise arguments.refused("is given a sequence at another place than before the head's size")
    settings = {
        "dropout_p": arguments.get(4, "dropout_p", 0.0),
        "scale": arguments.get(6, "scale"),
        "enable_gqa": arguments.get(7, "enable_gqa", False),
    }
    causal = bool(arguments.get(5, "is_causal", False))
    if not isinstance(q, HeadShard):  # every rank has all queries
        k, v = _gathered_pair(k, v)
        mask = whole(mask) if isinstance(mask, HeadShard) else mask
        return func(q, k, v, mask, is_causal=causal, **settings)
    if _division(q).kind == ALL_TO_ALL:
        return _by_heads(func, q, k, v, mask, causal, settings, arguments)
    return _by_positions(func, q, k, v, mask, causal, settings, arguments)


def _by_positions(
    func: Function,
    q: HeadShard,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Any,
    causal: bool,
    settings: dict[str, Any],
    arguments: Arguments,
) -> HeadShard:
    """Own queries against gathered keys and values; causal chunks see what lies before them."""
    k, v = _gathered_pair(k, v)
    division, layout = _division(q), q.divided
    if mask is not None:
        rows = int(q.shape[-2])
        own = mask.local if isinstance(mask, HeadShard) else mask
        if own is mask:
            own = whole_operand(mask, 2, layout, rows, arguments)
        return HeadShard(func(q.local, k, v, own, is_causal=causal, **settings), layout)
    if not causal or division.is_planned:
        # One kernel of the whole square's flops, as all causal attention is counted.
        return HeadShard(func(q.local, k, v, is_causal=causal, **settings), layout)
    if layout.parts != 2 or q.shape[-2] != k.shape[-2]:
        raise arguments.refused("is causal over positions that are not those of the keys")
    first, last = division.chunks
    size = int(q.shape[-2]) // (2 * division.degree)
    results = []
    for chunk, queries in zip((first, last), q.local.chunk(2, -2), strict=True):
        seen = (chunk + 1) * size
        keys, values = k[..., :seen, :], v[..., :seen, :]
        if queries.device.type == "cpu":
            before = torch.ones(size, seen, dtype=torch.bool).tril(seen - size)
            results.append(func(queries, keys, values, before, **settings))
        else:
            results.append(attend_to_last(queries, keys, values, **settings))
    return HeadShard(torch.cat(results, -2), layout)


def _gathered_pair(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all positions, in one exchange where they are of one size."""
    if not isinstance(k, HeadShard) or not isinstance(v, HeadShard):
        return (
            whole(k) if isinstance(k, HeadShard) else k,
            whole(v) if isinstance(v, HeadShard) else v,
        )
    if k.shape != v.shape or k.dtype != v.dtype or k.divided.parts != v.divided.parts:
        return whole(k), whole(v)
    both = torch.stack((k.local, v.local))
    division = _division(k)
    pair = gather(both, -2, division.pieces(k.divided.parts), division.context)
    return pair.unbind(0)  # type: ignore[return-value]


def _by_heads(
    func: Function,
    q: HeadShard,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Any,
    causal: bool,
    settings: dict[str, Any],
    arguments: Arguments,
) -> HeadShard:
    """All positions of a part of the heads, and back."""
    division, degree = _division(q), _division(q).degree
    if q.ndim < 3 or int(q.shape[-3]) % degree:
        heads = int(q.shape[-3]) if q.ndim > 2 else 1
        raise arguments.refused(
            f"exchanges heads for positions, and {heads} heads do not divide by cp={degree}; use "
            "cp_comm_type=all_gather, or a degree that divides them"
        )

    def exchanged(tensor: torch.Tensor, what: str) -> torch.Tensor:
        if not isinstance(tensor, HeadShard):
            return division.own_heads(tensor)
        local, heads = tensor.local, int(tensor.shape[-3])
        if heads % degree:
            if degree % heads:
                raise arguments.refused(
                    f"exchanges heads for positions, and {heads} heads of {what} neither divide by "
                    f"cp={degree} nor the degree by them; use cp_comm_type=all_gather"
                )
            local = local.repeat_interleave(degree // heads, -3)  # each rank its own copy
        return swap(local, -3, -2, division.context)

    queries, keys, values = exchanged(q, "q"), exchanged(k, "keys"), exchanged(v, "values")
    if isinstance(mask, HeadShard):
        mask = whole(mask)
    if mask is not None and mask.ndim > 2 and mask.shape[-3] != 1:
        mask = division.own_heads(mask)
    result = func(queries, keys, values, mask, is_causal=causal, **settings)
    return HeadShard(swap(result, -2, -3, division.context), q.divided)


@handles("matmul __matmul__ bmm")
def _matmul(func: Function, arguments: Arguments) -> Any:
    """Positions times positions: the right operand is gathered (keys, then values)."""
    left, right = arguments.args[:2]
    if isinstance(left, HeadShard) and isinstance(right, HeadShard) and _offset(left) == 2:
        if _offset(right) in (1, 2):
            _refuse_exchange(left, arguments)
            return HeadShard(func(left.local, whole(right)), left.divided)
    elif isinstance(left, HeadShard) and _offset(left) == 1:
        return _sum_over_positions(func, left, right, arguments)
    return HANDLERS["matmul"](func, arguments)


def _refuse_exchange(shard: HeadShard, arguments: Arguments) -> None:
    if _division(shard).kind == ALL_TO_ALL:
        raise arguments.refused(
            "multiplies positions by positions itself, and heads are exchanged around "
            "scaled_dot_product_attention only; use cp_comm_type=all_gather"
        )


def _sum_over_positions(
    func: Function, left: HeadShard, right: torch.Tensor, arguments: Arguments
) -> torch.Tensor:
    """A sum over positions, as of linear attention's states: each rank adds its own."""
    if not isinstance(right, HeadShard) or _offset(right) != 2:
        raise arguments.refused("sums over positions of one operand only")
    if left.divided.parts != right.divided.parts:
        raise arguments.refused("joins tensors that are divided differently")
    return total(func(left.local, right.local), _division(left).context)


@handles("baddbmm")
def _add_product(func: Function, arguments: Arguments) -> Any:
    """A bias of positions and queries times keys, as attention without rotary tables has it."""
    added, left, right = (
        arguments.get(i, name) for i, name in enumerate(("input", "batch1", "batch2"))
    )
    if not isinstance(left, HeadShard) or _offset(left) != 2 or _offset(right) not in (0, 1):
        return HANDLERS["baddbmm"](func, arguments)
    _refuse_exchange(left, arguments)
    keys = whole(right) if isinstance(right, HeadShard) else right
    if isinstance(added, HeadShard):
        added = added.local if _offset(added) == 2 else whole(added)
    own = whole_operand(added, 2, left.divided, int(left.shape[-2]), arguments)
    for place, (name, value) in enumerate(
        (("input", own), ("batch1", left.local), ("batch2", keys))
    ):
        arguments.set(place, name, value)
    return HeadShard(func(*arguments.args, **arguments.kwargs), left.divided)


@handles("einsum")
def _einsum(func: Function, arguments: Arguments) -> Any:
    """The first divided operand keeps its positions, those of the others are gathered."""
    equation, operands = arguments.args[0].replace(" ", ""), list(arguments.args[1:])
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    terms = equation.partition("->")[0].split(",")
    if len(terms) != len(operands) or "." in equation:
        raise arguments.refused("is understood without dots")
    letters = [
        term[t.divided.dim] if isinstance(t, HeadShard) else ""
        for term, t in zip(terms, operands, strict=True)
    ]
    kept = next(letter for letter in letters if letter)
    for place, letter in enumerate(letters):
        if letter and letter != kept:
            _refuse_exchange(operands[place], arguments)
            operands[place] = whole(operands[place])
    again = Arguments(name=arguments.name, args=[equation, *operands], kwargs={})
    return HANDLERS["einsum"](func, again)


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
    local = total(arguments.call(func), _division(shard).context)
    return local / _division(shard).degree if arguments.name == "mean" else local


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
    summed = total(losses, _division(scores).context)
    if reduction == "sum":
        return summed
    return summed / _weight_of(target, arguments, _division(scores))


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
    division, size = _division(shard), int(shard.shape[dim])
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
