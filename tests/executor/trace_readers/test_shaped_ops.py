from __future__ import annotations

from typing import Any

import pytest
import torch

from claw_plan.executor.op_keys import op_works
from claw_plan.executor.torch_private import TorchDispatchMode
from claw_plan.executor.trace_readers.shaped_ops import (
    call_of,
    element_bytes,
    shape_of,
    tensor_bytes,
    work_of,
)
from claw_plan.profiles.work import OpWork


class Works(TorchDispatchMode):
    """What our own recorder says of each call: the oracle."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[OpWork] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.found += op_works(func, args, kwargs or {}, out, "forward")
        return out


def key(work: OpWork) -> tuple[object, ...]:
    return work.kind, work.dims, work.dtype, work.flops, work.target


@pytest.mark.parametrize(
    ("name", "tensors", "values"),
    [
        ("mm", [(4, 8), (8, 6)], []),
        ("bmm", [(3, 4, 8), (3, 8, 6)], []),
        ("addmm", [(6,), (4, 8), (8, 6)], []),
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            [(2, 3, 16, 8), (2, 3, 16, 8), (2, 3, 16, 8)],
            [0.0, True],
        ),
    ],
)
def test_a_call_has_the_key_that_our_recorder_gives_it(
    name: str, tensors: list[tuple[int, ...]], values: list[Any]
) -> None:
    with Works() as works:
        getattr(torch.ops.aten, name)(*(torch.ones(shape) for shape in tensors), *values)
    dims = [list(shape) for shape in tensors] + [[]] * len(values)
    types = ["float"] * len(tensors) + ["Scalar"] * len(values)
    texts = [""] * len(tensors) + [str(value) for value in values]
    call = call_of(f"aten::{name}", dims, types, texts)
    assert call is not None
    found = work_of(call, "forward")
    assert found is not None
    assert key(found) == key(works.found[-1])
    assert found.bytes == pytest.approx(works.found[-1].bytes, rel=0.2)


@pytest.mark.parametrize(
    ("name", "dims", "types"),
    [
        ("aten::mm", [[4, 8], [7, 6]], ["float", "float"]),  # inner dims differ
        ("aten::mm", [[4, 8]], ["float"]),
        ("aten::mm", [[4, "x"], [8, 6]], ["float", "float"]),
        ("aten::mm", [[4, 8], [8, 6]], ["mystery", "mystery"]),
        ("aten::mm", [[4, 8], [8, 6]], []),
        ("aten::gelu", [[4, 8]], ["float"]),
    ],
)
def test_what_is_not_told_gives_nothing(name: str, dims: Any, types: Any) -> None:
    call = call_of(name, dims, types, None)
    assert call is not None and work_of(call, "forward") is None


def test_what_is_no_call_is_none() -> None:
    assert call_of("aten::mm", "x", None, None) is None


def test_sizes() -> None:
    assert element_bytes("c10::BFloat16") == 2 and element_bytes("Tensor(float)") == 4
    assert element_bytes("Float") == 4 and element_bytes(None) is None
    assert tensor_bytes([394241], "float") == 1576964
    assert tensor_bytes([[2, 3], [4]], "Half") == 20
    assert tensor_bytes([[2], ["x"]], "float") is None
    assert shape_of([1 << 30, 1 << 30]) is None and shape_of([-1]) is None
    assert shape_of([True]) is None and shape_of([]) == ()
