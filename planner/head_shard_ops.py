"""The translations of torch functions to divided tensors: global arguments in, local kernels run.

Importing this module fills `planner.head_shard.HANDLERS`. Where an operation would need the other
ranks' values (a norm over the divided dimension, a sum over all heads) there is no translation,
and it is refused; the shape of a result is never guessed.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from claw_plan.planner.errors import PiecesNeeded
from claw_plan.planner.head_shard import (
    Arguments,
    HeadShard,
    common_layout,
    handles,
    meet,
    whole_operand,
)
from claw_plan.planner.vocabulary_parallel_loss import log_softmax

Function = Callable[..., Any]
_Extreme = namedtuple("_Extreme", "values indices")


# Element by element.


@handles(
    "contiguous clone detach float half bfloat16 double cuda cpu alias gelu silu relu relu_ relu6 "
    "mish tanh sigmoid logsigmoid exp exp_ exp2 expm1 log log2 log1p sqrt rsqrt abs neg __neg__ "
    "negative square reciprocal dropout clamp clamp_min clamp_max clip leaky_relu elu selu celu "
    "softplus hardswish hardsigmoid hardtanh erf sin cos sign nan_to_num round floor isnan isinf "
    "logical_not zeros_like ones_like empty_like rand_like full_like threshold softsign "
    "add sub mul div true_divide subtract multiply divide pow rsub add_ sub_ mul_ div_ "
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __div__ __truediv__ __rtruediv__ __rdiv__ "
    "__pow__ __rpow__ __iadd__ __isub__ __imul__ __itruediv__ where masked_fill masked_fill_ "
    "maximum minimum lerp addcmul fmod eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ "
    "__ge__ logical_and logical_or __and__ __or__ __invert__ floor_divide __floordiv__"
)
def _pointwise(func: Function, arguments: Arguments) -> HeadShard:
    """Shards must be divided alike; whole operands broadcast over the divided dimension."""
    overwrites = arguments.name.endswith("_") and not arguments.name.endswith("__")
    overwrites |= arguments.name in ("__iadd__", "__isub__", "__imul__", "__itruediv__")
    if overwrites and not isinstance(arguments.args[0], HeadShard):
        raise arguments.refused("writes a divided tensor into a whole one")
    offset, layout, extent = common_layout(arguments)
    local = arguments.call(func, lambda t: whole_operand(t, offset, layout, extent, arguments))
    result = HeadShard(local, replace(layout, dim=local.ndim - offset))
    if result.shape[-offset] != extent:
        raise arguments.refused("changes the size of the divided dimension")
    return result


@handles("to type type_as")
def _convert(func: Function, arguments: Arguments) -> Any:
    """A change of dtype or device; a second tensor only lends its own."""
    first = arguments.args[0]
    if not isinstance(first, HeadShard):
        return arguments.call(func)
    result = arguments.call(func)
    return HeadShard(result, first.divided) if isinstance(result, torch.Tensor) else result


# Along other dimensions than the divided one.


def _dims(value: Any, shard: HeadShard, arguments: Arguments) -> list[int]:
    if value is None:
        raise arguments.refused("runs over all dimensions")
    values = value if isinstance(value, list | tuple | torch.Size) else (value,)
    if not all(isinstance(dim, int) for dim in values):
        raise arguments.refused("is given no dimensions")
    dims = [dim % shard.ndim for dim in values]
    if shard.divided.dim in dims:
        raise arguments.refused("runs along the divided dimension")
    return dims


@handles("softmax log_softmax cumsum cumprod normalize glu")
def _along(func: Function, arguments: Arguments) -> HeadShard:
    shard = arguments.subject()
    default = {"normalize": 1, "glu": -1}.get(arguments.name)
    dim = arguments.get(2 if arguments.name == "normalize" else 1, "dim", default)
    if arguments.name == "glu" and dim % shard.ndim == shard.divided.dim:
        first, second = _cut_evenly(shard, [shard.shape[dim] // 2] * 2, arguments)
        gated = first * second.sigmoid()
        assert isinstance(gated, HeadShard)
        return gated
    is_vocabulary = shard.divided.extent is not None and isinstance(dim, int)
    if is_vocabulary and arguments.name == "log_softmax" and dim % shard.ndim == shard.divided.dim:
        return log_softmax(shard, arguments.kwargs.get("dtype"))
    _dims(dim, shard, arguments)
    return HeadShard(arguments.call(func), shard.divided)


@handles("sum mean amax amin var std logsumexp prod max min argmax argmin norm")
def _reduction(func: Function, arguments: Arguments) -> Any:
    shard = arguments.subject()
    index = 2 if arguments.name == "norm" else 1
    dims = _dims(arguments.get(index, "dim"), shard, arguments)
    results = arguments.call(func)

    def wrap(local: torch.Tensor) -> HeadShard:
        before = sum(dim < shard.divided.dim for dim in dims) if local.ndim < shard.ndim else 0
        return HeadShard(local, replace(shard.divided, dim=shard.divided.dim - before))

    return wrap(results) if isinstance(results, torch.Tensor) else _Extreme(*map(wrap, results))


@handles("layer_norm rms_norm")
def _norm(func: Function, arguments: Arguments) -> HeadShard:
    """Over the last dimensions, e.g. of every head on its own."""
    shard = arguments.subject()
    covered = len(arguments.get(1, "normalized_shape"))
    _dims(list(range(shard.ndim - covered, shard.ndim)), shard, arguments)
    local = arguments.call(func, lambda t: meet(t, shard.divided))
    return HeadShard(local, shard.divided)


@handles("linear")
def _linear(func: Function, arguments: Arguments) -> HeadShard:
    """A whole weight over another dimension, e.g. one for every head."""
    shard = arguments.subject()
    _dims(-1, shard, arguments)
    local = arguments.call(func, lambda t: meet(t, shard.divided))
    return HeadShard(local, shard.divided)


# Products.


@handles("matmul __matmul__ bmm baddbmm")
def _matmul(func: Function, arguments: Arguments) -> HeadShard:
    """Batches of products divided over a batch dimension, or divided rows times a whole matrix."""
    offset, layout, _ = common_layout(arguments)
    if offset >= 3:
        result: HeadShard = _pointwise(func, arguments)
        return result
    left, *others = arguments.args
    if offset != 2 or not isinstance(left, HeadShard) or len(arguments.shards()) > 1:
        raise arguments.refused("sums over the divided dimension")
    if arguments.name == "baddbmm" or others[0].ndim < 2:
        raise arguments.refused("has no divided form over the rows")
    local = func(left.local, meet(others[0], layout))
    return HeadShard(local, replace(layout, dim=local.ndim - 2))


@handles("scaled_dot_product_attention")
def _attention(func: Function, arguments: Arguments) -> HeadShard:
    """Attention over divided heads (or any batch dimension); grouped k and v divide with them.

    Whole k and v are those of all heads, or of one that all share.
    """
    names = ("query", "key", "value")
    q, k, v = (arguments.get(i, name) for i, name in enumerate(names))
    is_whole = not isinstance(k, HeadShard)
    if not isinstance(q, HeadShard) or is_whole == isinstance(v, HeadShard):
        raise arguments.refused("needs query, key and value divided alike")
    mask = arguments.get(3, "attn_mask")
    arguments.set(3, "attn_mask", None)
    offset, layout, _ = common_layout(arguments)
    heads, kv_heads = q.shape[-offset], k.shape[-offset]
    grouped = arguments.get(7, "enable_gqa", False) and heads % kv_heads == 0
    grouped = grouped and (kv_heads == 1 or not is_whole)
    if offset < 3 or k.shape[-offset] != v.shape[-offset] or (heads != kv_heads and not grouped):
        raise arguments.refused("needs the same heads of query, key and value on one rank")
    if heads != kv_heads and layout.parts > 1:
        raise arguments.refused("cannot group heads that are divided in pieces")
    if isinstance(mask, HeadShard):
        raise arguments.refused("has a divided mask")
    if mask is not None:
        mask = whole_operand(mask, offset, layout, heads, arguments)
    arguments.set(3, "attn_mask", mask)
    if is_whole:
        arguments.set(1, "key", whole_operand(k, offset, layout, heads, arguments))
        arguments.set(2, "value", whole_operand(v, offset, layout, heads, arguments))
    return HeadShard(arguments.call(func), replace(layout, dim=q.ndim - offset))


@handles("einsum")
def _einsum(func: Function, arguments: Arguments) -> HeadShard:
    """The letter of the divided dimension must be the same in all shards and in the result."""
    equation, operands = arguments.args[0].replace(" ", ""), arguments.args[1:]
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    inputs, arrow, output = equation.partition("->")
    terms = inputs.split(",")
    if not arrow or "." in equation or len(terms) != len(operands):
        raise arguments.refused("is understood with an arrow and without dots")
    pairs = list(zip(terms, operands, strict=True))
    shards = [(term, t) for term, t in pairs if isinstance(t, HeadShard)]
    letters = {term[t.divided.dim] for term, t in shards}
    layouts = {(t.divided.parts, id(t.divided.division), t.piece) for _, t in shards}
    letter = letters.pop()
    if letters or len(layouts) > 1 or letter not in output:
        raise arguments.refused(
            "sums over the divided dimension or joins differently divided ones"
        )
    first = shards[0][1]
    layout = replace(
        first.divided, columns=frozenset().union(*(t.divided.columns for _, t in shards))
    )
    extent = first.piece * layout.parts
    local = [
        t.local
        if isinstance(t, HeadShard)
        else whole_operand(t, t.ndim - term.index(letter), layout, extent, arguments)
        if letter in term
        else meet(t, layout)
        for term, t in pairs
    ]
    return HeadShard(func(equation, *local), replace(layout, dim=output.index(letter)))


# Cutting and joining.


def _cut(shard: HeadShard, start: int, stop: int, arguments: Arguments) -> HeadShard:
    """Indices start:stop of the divided dimension, which must be whole pieces."""
    layout, extent = shard.divided, int(shard.shape[shard.divided.dim])
    if (start, stop) == (0, extent):
        return shard
    if start % shard.piece or stop % shard.piece:
        pieces = extent // math.gcd(extent, start, stop)
        raise PiecesNeeded(
            str(arguments.refused(f"takes {start}:{stop} of the divided dimension")),
            columns=layout.columns,
            pieces=math.lcm(pieces, layout.parts),
        )
    degree = layout.division.degree
    local = shard.local.narrow(layout.dim, start // degree, (stop - start) // degree)
    return HeadShard(local, replace(layout, parts=(stop - start) // shard.piece))


def _cut_evenly(
    shard: HeadShard, sizes: Sequence[int], arguments: Arguments
) -> tuple[HeadShard, ...]:
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    if shard.divided.parts == 1 and len(sizes) > 1:  # ask for all pieces at once
        pieces = edges[-1] // math.gcd(*sizes)
        raise PiecesNeeded(
            str(arguments.refused(f"cuts the divided dimension into {list(sizes)}")),
            columns=shard.divided.columns,
            pieces=pieces,
        )
    return tuple(_cut(shard, a, b, arguments) for a, b in pairwise(edges))


@handles("split split_with_sizes chunk")
def _split(func: Function, arguments: Arguments) -> tuple[HeadShard, ...]:
    shard = arguments.subject()
    names = ("split_size_or_sections", "split_size", "split_sizes", "chunks")
    wanted = arguments.args[1] if len(arguments.args) > 1 else None
    if wanted is None:
        wanted = next(arguments.kwargs[n] for n in names if n in arguments.kwargs)
    dim = arguments.get(2, "dim", 0) % shard.ndim
    if dim != shard.divided.dim:
        return tuple(HeadShard(local, shard.divided) for local in arguments.call(func))
    extent = int(shard.shape[dim])
    if isinstance(wanted, int):
        size = -(-extent // wanted) if arguments.name == "chunk" else wanted
        wanted = [min(size, extent - start) for start in range(0, extent, size)]
    return _cut_evenly(shard, list(wanted), arguments)


@handles("unbind select")
def _unbind(func: Function, arguments: Arguments) -> Any:
    shard = arguments.subject()
    dim = arguments.get(1, "dim", 0) % shard.ndim
    if dim == shard.divided.dim:
        raise _singly(shard, arguments)
    layout = replace(shard.divided, dim=shard.divided.dim - (dim < shard.divided.dim))
    result = arguments.call(func)
    if isinstance(result, torch.Tensor):
        return HeadShard(result, layout)
    return tuple(HeadShard(local, layout) for local in result)


def _singly(shard: HeadShard, arguments: Arguments) -> Exception:
    """A view that begins with q, k, v shows it divided until the column's pieces are known."""
    refusal = arguments.refused("takes single indices of the divided dimension")
    if shard.divided.parts > 1:
        return refusal
    pieces = int(shard.shape[shard.divided.dim])
    return PiecesNeeded(str(refusal), columns=shard.divided.columns, pieces=pieces)


@handles("__iter__")
def _iterate(func: Function, arguments: Arguments) -> Any:
    return iter(arguments.subject().unbind(0))


@handles("narrow")
def _narrow(func: Function, arguments: Arguments) -> HeadShard:
    shard = arguments.subject()
    dim, start, length = (
        arguments.get(i, name) for i, name in ((1, "dim"), (2, "start"), (3, "length"))
    )
    if dim % shard.ndim == shard.divided.dim:
        return _cut(shard, start, start + length, arguments)
    return HeadShard(arguments.call(func), shard.divided)


@handles("__getitem__")
def _index(func: Function, arguments: Arguments) -> HeadShard:
    """Integers, slices, None and dots; on the divided dimension whole pieces only."""
    shard = arguments.subject()
    index = arguments.args[1]
    index = index if isinstance(index, tuple) else (index,)
    if any(isinstance(item, bool | torch.Tensor | list) for item in index):
        raise arguments.refused("is indexed by a tensor or list")
    index = _without_dots(index, shard.ndim)
    taken, made = 0, 0
    local_index: list[Any] = []
    result_dim = -1
    for item in index:
        if item is None:
            made += 1
        elif taken == shard.divided.dim:
            if not isinstance(item, slice) or item.indices(shard.shape[taken])[2] != 1:
                raise _singly(shard, arguments)
            start, stop, _ = item.indices(int(shard.shape[taken]))
            shard, result_dim, item = _cut(shard, start, stop, arguments), made, slice(None)
            taken, made = taken + 1, made + 1
        else:
            taken, made = taken + 1, made + isinstance(item, slice)
        local_index.append(item)
    return HeadShard(func(shard.local, tuple(local_index)), replace(shard.divided, dim=result_dim))


def _without_dots(index: tuple[Any, ...], ndim: int) -> tuple[Any, ...]:
    used = sum(item is not None and item is not Ellipsis for item in index)
    place = next((i for i, item in enumerate(index) if item is Ellipsis), len(index))
    return (*index[:place], *[slice(None)] * (ndim - used), *index[place + 1 :])


@handles("cat concat concatenate")
def _cat(func: Function, arguments: Arguments) -> HeadShard:
    tensors = [t for t in arguments.get(0, "tensors") if t.shape != (0,)]  # torch skips these
    dim = arguments.get(1, "dim", 0)
    arguments.set(0, "tensors", tensors)
    offset, layout, extent = (
        common_layout(arguments) if not _along_divided(tensors, dim) else (0, None, 0)
    )
    if layout is not None:
        parts = [
            t.local
            if isinstance(t, HeadShard)
            else whole_operand(t, offset, layout, extent, arguments)
            for t in tensors
        ]
        return HeadShard(func(parts, dim), layout)
    if not all(isinstance(t, HeadShard) for t in tensors):
        raise arguments.refused("joins whole tensors to a divided dimension")
    if len({(id(t.divided.division), t.piece) for t in tensors}) > 1:
        raise arguments.refused("joins pieces of different sizes")
    columns = frozenset().union(*(t.divided.columns for t in tensors))
    return HeadShard(
        func([t.local for t in tensors], dim),
        replace(tensors[0].divided, parts=sum(t.divided.parts for t in tensors), columns=columns),
    )


def _along_divided(tensors: Sequence[torch.Tensor], dim: int) -> bool:
    return any(isinstance(t, HeadShard) and dim % t.ndim == t.divided.dim for t in tensors)


@handles("stack")
def _stack(func: Function, arguments: Arguments) -> HeadShard:
    tensors = arguments.get(0, "tensors")
    offset, layout, extent = common_layout(arguments)
    dim = arguments.get(1, "dim", 0) % (tensors[0].ndim + 1)
    parts = [
        t.local
        if isinstance(t, HeadShard)
        else whole_operand(t, offset, layout, extent, arguments)
        for t in tensors
    ]
    return HeadShard(func(parts, dim), replace(layout, dim=layout.dim + (dim <= layout.dim)))
