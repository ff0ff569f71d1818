"""Attention between all positions of a divided sequence, and products that amount to it.

Keys and values are gathered where scores are made, or heads are exchanged for positions around
`scaled_dot_product_attention` (DeepSpeed-Ulysses, arXiv 2309.14509). Importing this module fills
`SEQUENCE_HANDLERS`, as `context_parallel_ops` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from claw_plan.planner.candidate import ALL_TO_ALL
from claw_plan.planner.context_parallel_division import (
    Function,
    division_of,
    handles,
    offset_of,
    whole,
)
from claw_plan.planner.context_parallel_ranks import gather, swap, total
from claw_plan.planner.head_shard import HANDLERS, Arguments, HeadShard, whole_operand
from claw_plan.planner.torch_private import attend_to_last


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    """A call whose queries are divided by positions; `settings` are those of every kernel."""

    func: Function
    q: HeadShard
    k: torch.Tensor
    v: torch.Tensor
    mask: Any
    causal: bool
    settings: Mapping[str, Any]
    arguments: Arguments

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, *, causal: bool
    ) -> torch.Tensor:
        """The kernel on a rank's own tensors."""
        made: torch.Tensor = self.func(q, k, v, mask, is_causal=causal, **self.settings)
        return made


@handles("scaled_dot_product_attention")
def _attention(func: Function, arguments: Arguments) -> Any:
    """Every rank's queries meet the keys and values of all positions."""
    q, k, v = (arguments.get(i, name) for i, name in enumerate(("query", "key", "value")))
    mask = arguments.get(3, "attn_mask")
    if isinstance(mask, HeadShard) and offset_of(mask) != 2:
        arguments.set(3, "attn_mask", mask := whole(mask))
    if {offset_of(q), offset_of(k), offset_of(v)} - {0, 2}:
        if offset_of(q) >= 3:  # samples or heads are divided, not positions
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
    call = _Attention(
        func=func, q=q, k=k, v=v, mask=mask, causal=causal, settings=settings, arguments=arguments
    )
    return _by_heads(call) if division_of(q).kind == ALL_TO_ALL else _by_positions(call)


def _by_positions(call: _Attention) -> HeadShard:
    """Own queries against gathered keys and values; causal chunks see what lies before them."""
    q, mask, layout = call.q, call.mask, call.q.divided
    k, v = _gathered_pair(call.k, call.v)
    if mask is not None:
        own = mask.local if isinstance(mask, HeadShard) else mask
        if own is mask:
            own = whole_operand(mask, 2, layout, int(q.shape[-2]), call.arguments)
        return HeadShard(call.attend(q.local, k, v, own, causal=call.causal), layout)
    if not call.causal or division_of(q).is_planned:
        # One kernel of the whole square's flops, as all causal attention is counted.
        return HeadShard(call.attend(q.local, k, v, None, causal=call.causal), layout)
    if layout.parts != 2 or q.shape[-2] != k.shape[-2]:
        raise call.arguments.refused("is causal over positions that are not those of the keys")
    return HeadShard(_causal_chunks(call, k, v), layout)


def _causal_chunks(call: _Attention, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Each of a rank's two chunks of queries against the keys up to its own end."""
    division = division_of(call.q)
    size = int(call.q.shape[-2]) // (2 * division.degree)
    results = []
    for chunk, queries in zip(division.chunks, call.q.local.chunk(2, -2), strict=True):
        seen = (chunk + 1) * size
        keys, values = k[..., :seen, :], v[..., :seen, :]
        if queries.device.type == "cpu":
            before = torch.ones(size, seen, dtype=torch.bool).tril(seen - size)
            results.append(call.attend(queries, keys, values, before, causal=False))
        else:
            results.append(attend_to_last(queries, keys, values, **call.settings))
    return torch.cat(results, -2)


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
    division = division_of(k)
    pair = gather(both, -2, division.pieces(k.divided.parts), division.context)
    return pair.unbind(0)  # type: ignore[return-value]


def _by_heads(call: _Attention) -> HeadShard:
    """All positions of a part of the heads, and back."""
    q, division = call.q, division_of(call.q)
    if q.ndim < 3 or int(q.shape[-3]) % division.degree:
        heads = int(q.shape[-3]) if q.ndim > 2 else 1
        raise call.arguments.refused(
            f"exchanges heads for positions, and {heads} heads do not divide by "
            f"cp={division.degree}; use cp_comm_type=all_gather, or a degree that divides them"
        )
    named = {"q": q, "keys": call.k, "values": call.v}
    queries, keys, values = (_own_heads(call, each, what) for what, each in named.items())
    mask = whole(call.mask) if isinstance(call.mask, HeadShard) else call.mask
    if mask is not None and mask.ndim > 2 and mask.shape[-3] != 1:
        mask = division.own_heads(mask)
    result = call.attend(queries, keys, values, mask, causal=call.causal)
    return HeadShard(swap(result, -2, -3, division.context), q.divided)


def _own_heads(call: _Attention, tensor: torch.Tensor, what: str) -> torch.Tensor:
    """A rank's part of the heads at all positions."""
    division, degree = division_of(call.q), division_of(call.q).degree
    if not isinstance(tensor, HeadShard):
        return division.own_heads(tensor)
    local, heads = tensor.local, int(tensor.shape[-3])
    if heads % degree:
        if degree % heads:
            raise call.arguments.refused(
                f"exchanges heads for positions, and {heads} heads of {what} neither divide "
                f"by cp={degree} nor the degree by them; use cp_comm_type=all_gather"
            )
        local = local.repeat_interleave(degree // heads, -3)  # each rank its own copy
    return swap(local, -3, -2, division.context)


@handles("matmul __matmul__ bmm")
def _matmul(func: Function, arguments: Arguments) -> Any:
    """Positions times positions: the right operand is gathered (keys, then values)."""
    left, right = arguments.args[:2]
    if isinstance(left, HeadShard) and isinstance(right, HeadShard) and offset_of(left) == 2:
        if offset_of(right) in (1, 2):
            _refuse_exchange(left, arguments)
            return HeadShard(func(left.local, whole(right)), left.divided)
    elif isinstance(left, HeadShard) and offset_of(left) == 1:
        return _sum_over_positions(func, left, right, arguments)
    return HANDLERS["matmul"](func, arguments)


def _refuse_exchange(shard: HeadShard, arguments: Arguments) -> None:
    if division_of(shard).kind == ALL_TO_ALL:
        raise arguments.refused(
            "multiplies positions by positions itself, and heads are exchanged around "
            "scaled_dot_product_attention only; use cp_comm_type=all_gather"
        )


def _sum_over_positions(
    func: Function, left: HeadShard, right: torch.Tensor, arguments: Arguments
) -> torch.Tensor:
    """A sum over positions, as of linear attention's states: each rank adds its own."""
    if not isinstance(right, HeadShard) or offset_of(right) != 2:
        raise arguments.refused("sums over positions of one operand only")
    if left.divided.parts != right.divided.parts:
        raise arguments.refused("joins tensors that are divided differently")
    return total(func(left.local, right.local), division_of(left).context)


@handles("baddbmm")
def _add_product(func: Function, arguments: Arguments) -> Any:
    """A bias of positions and queries times keys, as attention without rotary tables has it."""
    added, left, right = (
        arguments.get(i, name) for i, name in enumerate(("input", "batch1", "batch2"))
    )
    if not isinstance(left, HeadShard) or offset_of(left) != 2 or offset_of(right) not in (0, 1):
        return HANDLERS["baddbmm"](func, arguments)
    _refuse_exchange(left, arguments)
    keys = whole(right) if isinstance(right, HeadShard) else right
    if isinstance(added, HeadShard):
        added = added.local if offset_of(added) == 2 else whole(added)
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
