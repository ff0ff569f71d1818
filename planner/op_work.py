"""What one operator call costs: from an aten call to kind, dims, flops and bytes of `OpWork`.

Flops come from torch's registry, and from the formulas below where it has none; bytes are those
the kernel moves on its own (no fusion, no cache). Views and `empty` move nothing and are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from claw_plan.planner.torch_private import storage_key, tree_leaves

Dims = tuple[int, ...]

FREE = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
"""Operators that allocate and write nothing."""

WRITES_ONLY = ("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_")
"""In-place operators that do not read the tensor they overwrite."""

TAKES_ROWS = (
    *("embedding", "index_select", "gather", "index", "_embedding_bag"),
    *("nll_loss_forward", "nll_loss2d_forward"),
)
"""Operators that read of their first operand only the rows they take."""

READS_NOT = {"nll_loss_backward": 1, "nll_loss2d_backward": 1}
"""Operators that take a tensor, at this place, only for its shape."""


class Work(NamedTuple):
    """One kernel of an operator call; most calls are one, convolution's backward is two."""

    kind: str
    dims: Dims
    dtype: str
    flops: int
    read_bytes: int
    written_bytes: int


def works_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Work]:
    """The kernels of one call; empty when it moves nothing and computes nothing."""
    name = func.overloadpacket.__name__
    inputs = _tensors((args, kwargs))
    outputs = _tensors(out)
    if name == "convolution_backward":
        return _convolution_backward(args, outputs, out)
    flops = _flops(func, args, kwargs, out)
    read, written = _traffic(func, name, args, inputs, outputs)
    if not (flops or read or written):
        return []
    kind = "memory"
    dims: Dims = ()
    if flops and name in _SHAPES:
        kind, shape = _SHAPES[name]
        dims = shape(args, out)
        flops = flops if kind == "attention" else 2 * math.prod(dims)
    return [Work(kind, dims, _dtype(inputs, outputs), flops, read, written)]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _dtype(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> str:
    """The dtype it computes in: of the result, or of the operands where the result is integers."""
    found = next((t for t in (*outputs, *inputs) if t.is_floating_point()), (outputs or inputs)[0])
    return str(found.dtype).removeprefix("torch.")


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor; of an expanded one those of its storage, which is smaller."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _sum_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(num_bytes(tensor) for tensor in tensors)


def _traffic(
    func: Any,
    name: str,
    args: Sequence[Any],
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
) -> tuple[int, int]:
    if name in FREE:
        return 0, 0
    held = {storage_key(tensor) for tensor in inputs}
    if not func._schema.is_mutable and all(storage_key(out) in held for out in outputs):
        return 0, 0
    if name in WRITES_ONLY:
        return _sum_bytes(inputs[1:]), _sum_bytes(outputs)
    if name in READS_NOT:
        shape_only = num_bytes(args[READS_NOT[name]])
        return _sum_bytes(inputs) - shape_only, _sum_bytes(outputs)
    if name in TAKES_ROWS:
        return _sum_bytes(inputs[1:]) + _sum_bytes(outputs[:1]), _sum_bytes(outputs)
    return _sum_bytes(inputs), _sum_bytes(outputs)


def _flops(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    packet = func.overloadpacket
    own = _OWN_FLOPS.get((func.namespace, packet.__name__))
    if own is not None:
        return own(args, out)
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def _attention_dims(args: Sequence[Any], out: Any) -> Dims:
    q, k, causal = args[0], args[1], args[5]
    return (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], int(causal))


def _attention_backward_dims(args: Sequence[Any], out: Any) -> Dims:
    return _attention_dims((*args[1:5], None, args[8]), out)


def _attention_flops(products: int) -> Callable[[Sequence[Any], Any], int]:
    """`products` of the two S x S products each; the whole square is counted, causal or not."""

    def flops(args: Sequence[Any], out: Any) -> int:
        q, k, v = args[:3]
        rows = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
        by_q, by_v = products - products // 2, products // 2
        return int(2 * rows * (by_q * q.shape[3] + by_v * v.shape[3]))

    return flops


_forward_flops, _backward_flops = _attention_flops(2), _attention_flops(5)

_OWN_FLOPS: dict[tuple[str, str], Callable[[Sequence[Any], Any], int]] = {
    # Forward: q k^T and p v. Flash attention's backward: q k^T again, dv, dp, dq, dk (Dao 2022).
    ("claw_plan", "attention"): _forward_flops,
    ("claw_plan", "attention_backward"): lambda args, out: _backward_flops(args[1:], out),
    ("claw_plan", "grouped_mm"): lambda args, out: 2 * math.prod(_grouped_dims(args, out)),
    ("transformers", "grouped_mm_fallback"): lambda args, out: (
        2 * math.prod(_grouped_dims(args, out))
    ),
    # Matrix times vector, which torch's registry leaves out.
    ("aten", "mv"): lambda args, out: 2 * args[0].numel(),
    ("aten", "dot"): lambda args, out: 2 * args[0].numel(),
    ("aten", "addmv"): lambda args, out: 2 * args[1].numel(),
}


def _product(first: int) -> Callable[[Sequence[Any], Any], Dims]:
    """Dims of a product whose operands are arguments `first` and the next."""

    def dims(args: Sequence[Any], out: Any) -> Dims:
        a, b = args[first], args[first + 1]
        if a.dim() == 1:
            return (1, 1, 1, a.shape[0])
        batch = a.shape[0] if a.dim() == 3 else 1
        return (batch, a.shape[-2], b.shape[-1] if b.dim() > 1 else 1, a.shape[-1])

    return dims


def _grouped_dims(args: Sequence[Any], out: Any) -> Dims:
    """Ragged groups together are one product; only 3-D times 3-D repeats it."""
    a, b = args[0], args[1]
    groups = a.shape[0] if a.dim() == 3 and b.dim() == 3 else 1
    return (groups, a.shape[-2], b.shape[-1], a.shape[-1])


def _convolution_dims(args: Sequence[Any], out: Any) -> Dims:
    image, weight, transposed = args[0], args[1], args[6]
    positions = (image if transposed else out).shape[2:]
    # Of a grouped convolution each output sees weight.shape[1] channels (transposed: each input).
    channels = (weight.shape[1], weight.shape[0])
    return (image.shape[0], *channels, math.prod(positions), math.prod(weight.shape[2:]))


def _convolution_backward(
    args: Sequence[Any], outputs: list[torch.Tensor], out: Any
) -> list[Work]:
    grad, image, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
    dims = _convolution_dims((image, weight, *[None] * 4, transposed), grad)
    dtype, flops = _dtype([grad], outputs), 2 * math.prod(dims)
    works = []
    for index, other in ((0, weight), (1, image)):
        if wanted[index]:
            read, written = _sum_bytes((grad, other)), num_bytes(out[index])
            works.append(Work("conv", dims, dtype, flops, read, written))
    if wanted[2]:
        works.append(Work("memory", (), dtype, 0, num_bytes(grad), num_bytes(out[2])))
    return works


_SHAPES: dict[str, tuple[str, Callable[[Sequence[Any], Any], Dims]]] = {
    "mm": ("gemm", _product(0)),
    "bmm": ("gemm", _product(0)),
    "mv": ("gemm", _product(0)),
    "dot": ("gemm", _product(0)),
    "addmm": ("gemm", _product(1)),
    "addmv": ("gemm", _product(1)),
    "_addmm_activation": ("gemm", _product(1)),
    "baddbmm": ("gemm", _product(1)),
    "addbmm": ("gemm", _product(1)),
    "grouped_mm": ("gemm", _grouped_dims),
    "grouped_mm_fallback": ("gemm", _grouped_dims),
    "convolution": ("conv", _convolution_dims),
    "_convolution": ("conv", _convolution_dims),
    "attention": ("attention", _attention_dims),
    "attention_backward": ("attention", _attention_backward_dims),
}
