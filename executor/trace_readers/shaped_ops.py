"""An operator's name and the shapes it was called with become `OpWork`, the key of a measurement.

Recorders write "Input Dims" and "Input type" of each call. Of products, attention and
convolutions these say all that the key needs; the planner looks such work up under the same key
(`planner.op_work`). Other operators are not told apart well enough and give nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from claw_plan.profiles.work import DTYPE_BYTES, OpWork

Shape = tuple[int, ...]

MOST_ELEMENTS = 1 << 40
"""A tensor of more elements is no tensor but a broken recording."""

DTYPES = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "Half": "float16",
    "c10::BFloat16": "bfloat16",
    "BFloat16": "bfloat16",
    "c10::Float8_e4m3fn": "float8",
    "c10::Float8_e5m2": "float8",
    "long": "int64",
    "long int": "int64",
    "int": "int32",
    "short": "int16",
    "signed char": "int8",
    "unsigned char": "uint8",
    "bool": "bool",
}
"""What recorders call the types of tensors (C++ names, as typeid gives them)."""

COMM_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Byte": "uint8",
    "Char": "int8",
    "Bool": "bool",
    "Float8_e4m3fn": "float8",
    "Float8_e5m2": "float8",
}
"""What `record_param_comms` calls them (c10::ScalarType)."""


def element_bytes(dtype: object) -> int | None:
    """Bytes of one element of a type by any of its names; None for an unknown one."""
    text = str(dtype).removeprefix("Tensor(").removesuffix(")")
    return DTYPE_BYTES.get(DTYPES.get(text, COMM_DTYPES.get(text, text)))


def shape_of(dims: object) -> Shape | None:
    """Dims as a shape; None for what is no plain shape of a plausible tensor."""
    if not isinstance(dims, list) or len(dims) > 16:
        return None
    if not all(type(size) is int and 0 <= size <= MOST_ELEMENTS for size in dims):
        return None
    return tuple(dims) if math.prod(dims) <= MOST_ELEMENTS else None


def tensor_bytes(dims: object, dtype: object) -> int | None:
    """Size of a tensor, or of a list of them; None where the recording does not tell."""
    size = element_bytes(dtype)
    if size is None:
        return None
    if isinstance(dims, list) and dims and all(isinstance(inner, list) for inner in dims):
        sizes = [tensor_bytes(inner, dtype) for inner in dims]
        return None if None in sizes else sum(size for size in sizes if size)
    shape = shape_of(dims)
    return None if shape is None else math.prod(shape) * size


class Call(NamedTuple):
    """One call of an operator as recorders write it down, argument by argument.

    `values` are the arguments that are no tensors, as text ("Concrete Inputs").
    """

    name: str
    dims: tuple[Shape | None, ...]
    types: tuple[str, ...]
    values: tuple[str, ...]


def call_of(name: str, dims: object, types: object, values: object) -> Call | None:
    """The call, from what a recording holds, which may be anything."""
    if not isinstance(dims, list) or not isinstance(types, list):
        return None
    values = values if isinstance(values, list) else []
    texts = tuple(str(value)[:20] for value in values[:20])
    return Call(
        name, tuple(shape_of(one) for one in dims[:20]), tuple(str(t) for t in types[:20]), texts
    )


def work_of(call: Call, phase: str) -> OpWork | None:
    """The work of one call, or None where name and shapes do not tell it."""
    try:
        return _MAKERS[call.name](call, phase)
    except (KeyError, IndexError, TypeError, ValueError):  # fewer or other operands than usual
        return None


def _dtype(call: Call, index: int) -> str:
    found = DTYPES.get(call.types[index])
    if found is None:
        raise ValueError(f"unknown dtype {call.types[index]!r}")
    return found


def _known(shapes: Sequence[Shape | None], index: int, rank: int) -> Shape:
    shape = shapes[index]
    if shape is None or len(shape) != rank or 0 in shape:
        raise ValueError(f"operand {index} has no shape of {rank} dims")
    return shape


Maker = Callable[["Call", str], OpWork]


def _product(first: int, rank: int) -> Maker:
    def work(call: Call, phase: str) -> OpWork:
        shapes = call.dims
        a, b = _known(shapes, first, rank), _known(shapes, first + 1, rank)
        dtype = _dtype(call, first)
        batch = a[0] if rank == 3 else 1
        m, n, k = a[-2], b[-1], a[-1]
        if b[-2] != k:
            raise ValueError("the inner dims differ")
        elements = batch * (m * k + k * n + m * n) + (math.prod(shapes[0] or ()) if first else 0)
        return OpWork(
            kind="gemm",
            dims=(batch, m, n, k),
            dtype=dtype,
            flops=2 * batch * m * n * k,
            bytes=elements * DTYPE_BYTES[dtype],
            phase=phase,
            target=call.name.replace("aten::", "aten."),
        )

    return work


def _attention(causal_at: int, *, backward: bool = False) -> Maker:
    """`causal_at` is the place of the argument `is_causal` in the operator's schema."""
    first = 1 if backward else 0

    def work(call: Call, phase: str) -> OpWork:
        q, k, v = (_known(call.dims, first + place, 4) for place in range(3))
        dtype = _dtype(call, first)
        causal = {"True": 1, "False": 0}[call.values[causal_at]]
        pairs = math.prod(q[:3]) * k[2]
        # Forward reads q, k, v and writes as much as q; backward also reads and writes gradients.
        tensors = math.prod(q) * (4 if backward else 2) + (math.prod(k) + math.prod(v)) * (
            2 if backward else 1
        )
        return OpWork(
            kind="attention",
            dims=(q[0], q[1], k[1], q[2], k[2], q[3], causal),
            dtype=dtype,
            flops=2 * (5 if backward else 2) * pairs * q[3],
            bytes=tensors * DTYPE_BYTES[dtype],
            phase=phase,
            target="claw_plan.attention_backward" if backward else "claw_plan.attention",
        )

    return work


_SDPA = "aten::_scaled_dot_product_"

_MAKERS: dict[str, Maker] = {
    "aten::mm": _product(0, 2),
    "aten::addmm": _product(1, 2),
    "aten::bmm": _product(0, 3),
    "aten::baddbmm": _product(1, 3),
    f"{_SDPA}flash_attention": _attention(4),
    f"{_SDPA}flash_attention_for_cpu": _attention(4),
    f"{_SDPA}efficient_attention": _attention(6),
    f"{_SDPA}cudnn_attention": _attention(6),
    f"{_SDPA}flash_attention_backward": _attention(11, backward=True),
    f"{_SDPA}flash_attention_for_cpu_backward": _attention(7, backward=True),
    f"{_SDPA}efficient_attention_backward": _attention(11, backward=True),
    f"{_SDPA}cudnn_attention_backward": _attention(14, backward=True),
}
"""Places of arguments as in torch 2.13's schemas."""

SHAPED = frozenset(_MAKERS)
"""Operators whose shapes are worth keeping while a trace is read."""
