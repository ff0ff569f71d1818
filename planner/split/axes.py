"""The axes along which an operator can be divided: what of each tensor lies along each of them.

An `Axis` says for every tensor of the operator which of its dimensions runs along it. Divided
along the axis, each rank does its part of the work on its part of those dimensions; tensors
without it are needed whole by every rank, and where the operator sums over it the result is a sum
over the ranks too. Operators that are not known here have no axis: they run whole.
`views` treats those that only change shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from claw_plan.planner.split.graph import FlowOp, Ref, SplitGraph

SHARE, KEEP, SUM = -1, -2, -3
"""In place of a dimension: needed whole for a part of the work; needed whole after the sum, as
the bias of a row linear; the result is a summand."""


class Axis(NamedTuple):
    """The dimension of every input and output along the axis, or one of the marks above.

    `size` is the extent that must divide by the degree where it is not that of every dimension
    (channels in groups), else 0.
    """

    label: str
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    size: int = 0


Shapes = list[tuple[int, ...]]
Finder = Callable[[FlowOp, Shapes, Shapes], list[Axis]]


def axes_of(op: FlowOp, graph: SplitGraph) -> list[Axis]:
    """All axes of the operator; none where it is not known or its tensors are unlike it."""
    taken = [graph.tensors[number].shape for number in op.inputs]
    made = [graph.tensors[number].shape for number in op.outputs]
    if not taken or not made:
        return []
    short = op.name.rpartition(".")[2]
    finder = _FINDERS.get(short)
    if finder is None and op.is_pointwise:
        finder = _pointwise
    return finder(op, taken, made) if finder else []


def is_sum(op: FlowOp) -> bool:
    """Whether it adds tensors, so that summands may be added before they are summed."""
    return op.name in ("aten.add", "aten.sub") and len(op.inputs) == 2


def _argument(op: FlowOp, index: int, name: str, default: Any = None) -> Any:
    return op.args[index] if len(op.args) > index else op.kwargs.get(name, default)


def _pointwise(op: FlowOp, taken: Shapes, made: Shapes) -> list[Axis]:
    out = made[0]
    if any(len(shape) > len(out) for shape in taken) or any(shape != out for shape in made):
        return []
    axes = []
    for dim, size in enumerate(out):
        takes = []
        for shape in taken:
            own = dim - len(out) + len(shape)
            takes.append(own if own >= 0 and shape[own] == size else SHARE)
        if any(take >= 0 for take in takes) and size > 1:
            axes.append(Axis(f"dim {dim}", tuple(takes), (dim,) * len(made)))
    return axes


def _mm(op: FlowOp, taken: Shapes, made: Shapes) -> list[Axis]:
    return [
        Axis("rows", (0, SHARE), (0,)),
        Axis("column", (SHARE, 1), (1,)),
        Axis("row", (1, 0), (SUM,)),
    ]


def _addmm(op: FlowOp, taken: Shapes, made: Shapes) -> list[Axis]:
    bias = taken[0]
    along = len(bias) - 1 if bias and bias[-1] == made[0][1] else SHARE
    rows = 0 if len(bias) == 2 and bias[0] == made[0][0] else SHARE
    return [
        Axis("rows", (rows, 0, SHARE), (0,)),
        Axis("column", (along, SHARE, 1), (1,)),
        Axis("row", (KEEP, 1, 0), (SUM,)),
    ]


def _bmm(op: FlowOp, taken: Shapes, made: Shapes) -> list[Axis]:
    return [
        Axis("batch", (0, 0), (0,)),
        Axis("rows", (1, SHARE), (1,)),
        Axis("column", (SHARE, 2), (2,)),
        Axis("row", (2, 1), (SUM,)),
    ]


def _baddbmm(op: FlowOp, taken: Shapes, made: Shapes) -> list[Axis]:
    if len(taken[0]) != 3 or taken[0] != made[0]:
        return []
    return [
        Axis("batch", (0, 0, 0), (0,)),
        Axis("rows", (1, 1, SHARE), (1,)),
        Axis("column", (2, SHARE, 2), (2,)),
    ]


def _grouped(op: FlowOp, taken: Shapes, made: Shapes) -> list[Axis]:
    """Rows in ragged groups times one matrix a group; the offsets are needed whole."""
    rest = (SHARE,) * (len(taken) - 2)
    if len(taken[1]) != 3 or len(taken[0]) != 2:
        return []
    return [Axis("column", (SHARE, 2, *rest), (1,)), Axis("row", (1, 1, *rest), (SUM,))]


def _attention(op: FlowOp, taken: Shapes, made: Shapes) -> list[Axis]:
    """Heads; grouped keys and values divide with them, one head for all is needed whole."""
    q, k = taken[0], taken[1]
    kv = 1 if k[1] > 1 else SHARE
    mask: tuple[int, ...] = ()
    if len(taken) > 3:
        offset = len(taken[3]) - 3
        mask = (offset if offset >= 0 and taken[3][offset] == q[1] else SHARE,)
    return [Axis("heads", (1, kv, kv, *mask), (1, 1), k[1] if k[1] > 1 else 0)]


def _along(op: FlowOp, taken: Shapes, made: Shapes) -> list[Axis]:
    """Every dimension but the one it runs along."""
    shape = taken[0]
    dim = _argument(op, 1, "dim", -1)
    if not isinstance(dim, int) or len(taken) > 1 or any(out != shape for out in made):
        return []
    return [
        Axis(f"dim {own}", (own,), (own,) * len(made))
        for own, size in enumerate(shape)
        if own != dim % len(shape) and size > 1
    ]


def _reduction(op: FlowOp, taken: Shapes, made: Shapes) -> list[Axis]:
    shape = taken[0]
    dims = _argument(op, 1, "dim")
    dims = (dims,) if isinstance(dims, int) else dims
    if not isinstance(dims, tuple) or len(taken) > 1 or not dims:
        return []
    over = {dim % len(shape) for dim in dims}
    keeps = len(made[0]) == len(shape)
    axes = []
    for own, size in enumerate(shape):
        if own not in over and size > 1:
            out = own if keeps else own - sum(dim < own for dim in over)
            axes.append(Axis(f"dim {own}", (own,), (out,) * len(made)))
        elif own in over and op.name == "aten.sum":
            axes.append(Axis("sum", (own,), (SUM,)))
    return axes


def _norm(op: FlowOp, taken: Shapes, made: Shapes) -> list[Axis]:
    """Over the last dimensions; its weights act on each part alike."""
    shape, covered = taken[0], len(op.args[1])
    rest = (SHARE,) * (len(taken) - 1)
    outer = len(shape) - covered
    return [
        Axis(f"dim {dim}", (dim, *rest), (dim,) * len(made))
        for dim in range(outer)
        if shape[dim] > 1
    ]


def _group_norm(op: FlowOp, taken: Shapes, made: Shapes) -> list[Axis]:
    """Channels, in whole groups."""
    return [Axis("channels", (1,) + (0,) * (len(taken) - 1), (1, 1, 1), int(op.args[6]))]


def _batch_norm(op: FlowOp, taken: Shapes, made: Shapes) -> list[Axis]:
    gives = tuple(1 if len(shape) > 1 else 0 for shape in made)
    fits = all(not shape or shape[-1 if len(shape) == 1 else 1] for shape in made)
    channels = taken[0][1]
    if not fits or any(len(shape) == 1 and shape[0] not in (0, channels) for shape in made):
        return []
    gives = tuple(
        SHARE if shape == (0,) else give for shape, give in zip(made, gives, strict=True)
    )
    return [Axis("channels", (1,) + (0,) * (len(taken) - 1), gives)]


def _convolution(op: FlowOp, taken: Shapes, made: Shapes) -> list[Axis]:
    """Output channels, input channels (a sum), or whole groups of both."""
    transposed, groups = op.args[6], int(op.args[8])
    outer, inner = (1, 0) if transposed else (0, 1)
    has_bias = len(taken) > 2
    if groups > 1:
        channels = (1, 0, 0) if has_bias else (1, 0)
        return [Axis("groups", channels, (1,), groups)]
    column = (SHARE, outer, 0) if has_bias else (SHARE, outer)
    row = (1, inner, KEEP) if has_bias else (1, inner)
    return [Axis("column", column, (1,)), Axis("row", row, (SUM,))]


def _spatial(op: FlowOp, taken: Shapes, made: Shapes) -> list[Axis]:
    """Pooling and resizing: every channel by itself."""
    if len(taken) > 1 or any(len(out) < 3 for out in made):
        return []
    return [Axis("channels", (1,), (1,) * len(made))]


def _embedding(op: FlowOp, taken: Shapes, made: Shapes) -> list[Axis]:
    last = len(made[0]) - 1
    positions = [Axis(f"dim {d}", (SHARE, d), (d,)) for d, n in enumerate(taken[1]) if n > 1]
    return [Axis("column", (1, SHARE), (last,)), *positions]


def _index(op: FlowOp, taken: Shapes, made: Shapes) -> list[Axis]:
    """Rows are taken from the first dimensions; those after them stay as they are."""
    picked = op.args[1]
    if not all(isinstance(item, Ref) for item in picked):
        return []
    shape, out = taken[0], made[0]
    rest = (SHARE,) * (len(taken) - 1)
    return [
        Axis(f"dim {own}", (own, *rest), (own - len(shape) + len(out),))
        for own in range(len(picked), len(shape))
        if shape[own] > 1
    ]


def _gather(op: FlowOp, taken: Shapes, made: Shapes) -> list[Axis]:
    """Along one dimension; others in which all tensors agree may be divided."""
    dim = _argument(op, 1, "dim")
    ndim = len(taken[0])
    if not isinstance(dim, int) or any(len(shape) != ndim for shape in (*taken, *made)):
        return []
    return [
        Axis(f"dim {own}", (own,) * len(taken), (own,) * len(made))
        for own in range(ndim)
        if own != dim % ndim and len({shape[own] for shape in (*taken, *made)}) == 1
        if taken[0][own] > 1
    ]


def _index_add(op: FlowOp, taken: Shapes, made: Shapes) -> list[Axis]:
    """Rows of the third tensor added where the second says; the other dimensions are untouched."""
    dim = _argument(op, 1, "dim")
    if not isinstance(dim, int) or len(taken) != 3:
        return []
    return [
        Axis(f"dim {own}", (own, SHARE, own), (own,))
        for own in range(len(taken[0]))
        if own != dim % len(taken[0]) and taken[0][own] > 1
    ]


def _same_shape(names: str, finder: Finder) -> dict[str, Finder]:
    return dict.fromkeys(names.split(), finder)


_FINDERS: dict[str, Finder] = {
    "mm": _mm,
    "addmm": _addmm,
    "bmm": _bmm,
    "baddbmm": _baddbmm,
    "attention": _attention,
    "convolution": _convolution,
    "embedding": _embedding,
    "index": _index,
    "index_add": _index_add,
    "native_group_norm": _group_norm,
    **_same_shape("clone _to_copy detach alias native_dropout expand masked_fill", _pointwise),
    **_same_shape("empty_like zeros_like ones_like rand_like bernoulli_ bernoulli", _pointwise),
    **_same_shape("grouped_mm grouped_mm_fallback", _grouped),
    **_same_shape("_softmax _log_softmax cumsum cumprod logcumsumexp", _along),
    **_same_shape("sum mean amax amin var std var_mean logsumexp prod argmax", _reduction),
    **_same_shape("native_layer_norm _fused_rms_norm", _norm),
    **_same_shape("native_batch_norm _native_batch_norm_legit cudnn_batch_norm", _batch_norm),
    **_same_shape("gather scatter scatter_add", _gather),
    **_same_shape(
        "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d upsample_nearest2d "
        "upsample_bilinear2d max_pool1d avg_pool1d",
        _spatial,
    ),
}
