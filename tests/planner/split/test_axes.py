"""Every axis is tried: the operator on two ranks' parts, against the operator on the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from claw_plan.planner.block_calls import BlockCall
from claw_plan.planner.head_shard import join_piecewise, slice_piecewise
from claw_plan.planner.split.axes import KEEP, SUM, Axis, axes_of, is_sum
from claw_plan.planner.split.graph import FlowOp, SplitGraph, split_graph

aten = torch.ops.aten
RANKS = 2


class Wrapped(torch.nn.Module):
    """A block of one operator; `other` tensors come beside the hidden state."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)


def number(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def graph_of(function: Callable[..., Any], tensors: list[torch.Tensor]) -> SplitGraph:
    block = Wrapped(function)
    args = tuple(t.requires_grad_() if t.is_floating_point() else t for t in tensors)
    return split_graph(BlockCall(block=block, args=args, kwargs={}))


def last_of(graph: SplitGraph) -> FlowOp:
    return graph.ops[-1]


def rows(count: int, size: int) -> torch.Tensor:
    return torch.randint(size, (count,))


CASES: dict[str, tuple[Callable[..., Any], list[torch.Tensor], int]] = {
    "add with broadcast": (aten.add, [number(2, 4, 6), number(4, 1)], 3),
    "scale": (lambda a: a * 3.0, [number(4, 6)], 2),
    "copy": (lambda a: aten._to_copy(a, dtype=torch.float32), [number(4, 6)], 2),
    "expand": (lambda a: aten.expand(a, [4, 2, 6]), [number(4, 1, 6)], 2),
    "mm": (aten.mm, [number(4, 6), number(6, 8)], 3),
    "addmm": (aten.addmm, [number(8), number(4, 6), number(6, 8)], 3),
    "bmm": (aten.bmm, [number(2, 4, 6), number(2, 6, 8)], 4),
    "softmax": (lambda a: aten._softmax(a, -1, False), [number(2, 4, 6)], 2),
    "cumsum": (lambda a: aten.cumsum(a, 1), [number(2, 4, 6)], 2),
    "mean": (lambda a: aten.mean(a, [-1], True), [number(2, 4, 6)], 2),
    "sum": (lambda a: aten.sum(a, [1]), [number(2, 4, 6)], 3),
    "convolution": (
        lambda x, w, b: aten.convolution(x, w, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        [number(2, 4, 5, 5), number(6, 4, 3, 3), number(6)],
        2,
    ),
    "transposed convolution": (
        lambda x, w: aten.convolution(x, w, None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1),
        [number(2, 4, 5, 5), number(4, 6, 2, 2)],
        2,
    ),
    "pooling": (lambda x: aten.avg_pool2d(x, [2, 2]), [number(2, 4, 6, 6)], 1),
    "embedding": (lambda w, i: aten.embedding(w, i), [number(9, 6), rows(4, 9)], 2),
    "index": (lambda x, i: aten.index(x, [i]), [number(9, 6), rows(4, 9)], 1),
    "gather": (
        lambda x, i: aten.gather(x, 1, i),
        [number(4, 6), torch.randint(6, (4, 3))],
        1,
    ),
    "index_add": (
        lambda x, i, y: aten.index_add(x, 0, i, y),
        [number(9, 6), rows(4, 9), number(4, 6)],
        1,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_parts_make_the_whole_along_every_axis(name: str) -> None:
    function, tensors, count = CASES[name]
    graph = graph_of(function, tensors)
    axes = axes_of(last_of(graph), graph)
    assert len(axes) == count
    with torch.no_grad():
        whole = function(*tensors)
        for axis in axes:
            torch.testing.assert_close(joined(axis, function, tensors), whole)


def joined(axis: Axis, function: Callable[..., Any], tensors: list[torch.Tensor]) -> torch.Tensor:
    parts = []
    for rank in range(RANKS):
        local = []
        for tensor, dim in zip(tensors, axis.takes, strict=True):
            if dim >= 0:
                tensor = slice_piecewise(tensor, dim, parts=1, degree=RANKS, rank=rank)
            elif dim == KEEP:  # added once, after the sum
                tensor = tensor / RANKS
            local.append(tensor)
        parts.append(_resized(function, axis, local, tensors))
    if axis.gives[0] == SUM:
        return parts[0] + parts[1]
    return join_piecewise(parts, axis.gives[0], parts=1)


def _resized(
    function: Callable[..., Any], axis: Axis, local: list[torch.Tensor], whole: list[torch.Tensor]
) -> torch.Tensor:
    """`expand` names sizes of the whole, of which a rank has half."""
    if whole[0].shape == (4, 1, 6):
        sizes = [4, 2, 6]
        sizes[axis.gives[0]] //= RANKS
        result: torch.Tensor = local[0].expand(sizes)
        return result
    result = function(*local)
    return result


def test_sums_over_an_axis_are_told_apart() -> None:
    graph = graph_of(aten.mm, [number(4, 6), number(6, 8)])
    assert [axis.label for axis in axes_of(last_of(graph), graph)] == ["rows", "column", "row"]
    assert axes_of(last_of(graph), graph)[2].gives == (SUM,)


def test_what_is_not_known_has_no_axis() -> None:
    graph = graph_of(lambda a: torch.roll(a, 1, -1), [number(4, 6)])
    assert axes_of(last_of(graph), graph) == []


def test_only_sums_of_tensors_add_summands() -> None:
    assert is_sum(last_of(graph_of(aten.add, [number(4), number(4)])))
    assert not is_sum(last_of(graph_of(aten.mul, [number(4), number(4)])))
