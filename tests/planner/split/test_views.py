"""Views on two ranks' parts against views of the whole, for every cut that is said to be right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from claw_plan.planner.block_calls import BlockCall
from claw_plan.planner.head_shard import slice_piecewise
from claw_plan.planner.split.graph import SplitGraph, split_graph
from claw_plan.planner.split.states import State, cut, fits
from claw_plan.planner.split.views import is_view, join_of, pieces_of, reshaped, view_of

aten = torch.ops.aten
RANKS = 2


class Wrapped(torch.nn.Module):
    """A block of one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)


def graph_of(function: Callable[..., Any], *tensors: torch.Tensor) -> SplitGraph:
    args = tuple(tensor.requires_grad_() for tensor in tensors)
    return split_graph(BlockCall(block=Wrapped(function), args=args, kwargs={}))


VIEWS: dict[str, tuple[Callable[..., Any], tuple[int, ...], dict[State, State | None]]] = {
    "heads": (lambda a: a.view(2, 5, 4, 3), (2, 5, 12), {cut(2): cut(2), cut(2, 2): cut(2, 2)}),
    "fused": (
        lambda a: a.view(2, 5, 3, 4, 2),
        (2, 5, 24),
        {cut(2): None, cut(2, 3): cut(3)},
    ),
    "joined heads": (
        lambda a: a.reshape(2, 5, 8),
        (2, 5, 4, 2),
        {cut(2): cut(2), cut(3): cut(2, 4)},
    ),
    "rows": (lambda a: a.view(10, 4), (2, 5, 4), {cut(2): cut(1), cut(0): cut(0)}),
    "transposed": (lambda a: a.transpose(1, 2), (2, 4, 6), {cut(1): cut(2), cut(0): cut(0)}),
    "permuted": (lambda a: a.permute(2, 0, 1), (2, 4, 6), {cut(1): cut(2), cut(2): cut(0)}),
    "turned": (lambda a: aten.t(a), (4, 6), {cut(0): cut(1), cut(1, 3): cut(0, 3)}),
    "widened": (lambda a: a.unsqueeze(1), (4, 6), {cut(0): cut(0), cut(1): cut(2)}),
    "selected": (lambda a: a.select(0, 1), (2, 4), {cut(1): cut(0), cut(0): None}),
    "sliced": (lambda a: a[:, :4], (4, 12), {cut(1, 3): cut(1), cut(1): None, cut(0): cut(0)}),
}


@pytest.mark.parametrize("name", VIEWS)
def test_cuts_go_where_the_elements_go(name: str) -> None:
    function, shape, expected = VIEWS[name]
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    graph = graph_of(function, whole)
    for state, becomes in expected.items():
        origin = slice_piecewise(
            whole.detach(), state.dim, parts=state.parts, degree=RANKS, rank=1
        )
        states: tuple[State, ...] | None = (state,)
        for op in graph.ops:
            assert is_view(op)
            if states is not None and fits(shape, states[0], RANKS):
                states = view_of(op, graph, states[0], RANKS)
        assert states == (None if becomes is None else (becomes,))
        if becomes is not None:
            made = function(whole).detach()
            part = slice_piecewise(made, becomes.dim, parts=becomes.parts, degree=RANKS, rank=1)
            ours, theirs = set(part.flatten().tolist()), set(origin.flatten().tolist())
            assert ours <= theirs and (ours == theirs or name in ("selected", "sliced"))


def test_q_k_and_v_ask_for_three_pieces() -> None:
    graph = graph_of(lambda a: torch.cat(a.split(4, dim=1)), torch.zeros(2, 12))
    split = next(op for op in graph.ops if op.name == "aten.split")
    assert list(pieces_of(split, graph)) == [3]
    assert view_of(split, graph, cut(1, 3), 4) == (cut(1),) * 3
    assert view_of(split, graph, cut(1), 2) is None


def test_joined_pieces_lie_one_after_another() -> None:
    graph = graph_of(lambda a, b: torch.cat([a, b], 1), torch.zeros(2, 4), torch.zeros(2, 4))
    (op,) = graph.ops
    assert join_of(op, graph, (cut(1), cut(1))) == cut(1, 2)
    assert join_of(op, graph, (cut(0), cut(0))) == cut(0)
    assert join_of(op, graph, (cut(0), cut(1))) is None


def test_a_head_is_never_cut_in_the_middle_of_a_shape() -> None:
    assert reshaped((10, 12), (10, 3, 4), cut(1)) == cut(1)
    assert not fits((10, 3, 4), cut(1), 2)  # three heads over two ranks
