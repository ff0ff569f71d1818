from dataclasses import dataclass, field

import pytest
import torch
import torch.nn as nn

from claw_plan.planner.block_calls import BlockCall
from claw_plan.planner.split.axes import axes_of
from claw_plan.planner.split.costs import SplitCosts
from claw_plan.planner.split.graph import FlowTensor, SplitGraph, split_graph
from claw_plan.planner.split.states import PARTIAL, SHARED, WHOLE, Change, cut
from claw_plan.profiles.work import OpWork


@dataclass
class Asked:
    """A cost model that remembers what it was asked: a kernel takes 1, a collective its bytes."""

    works: list[OpWork] = field(default_factory=list)
    collectives: list[tuple[str, int]] = field(default_factory=list)

    def costs(self) -> SplitCosts:
        return SplitCosts(op_ns=self._op, collective_ns=self._collective, gradient_ns=lambda n: n)

    def _op(self, work: OpWork) -> int:
        self.works.append(work)
        return 1

    def _collective(self, op: str, size: int) -> int:
        self.collectives.append((op, size))
        return size


@pytest.fixture
def linear() -> SplitGraph:
    block = nn.Linear(8, 16, bias=False).double()
    hidden = torch.zeros(4, 8, dtype=torch.float64, requires_grad=True)
    return split_graph(BlockCall(block=block, args=(hidden,), kwargs={}))


@pytest.mark.parametrize(
    ("label", "states", "forward", "share"),
    [
        ("column", ((SHARED, cut(1)), (cut(1),)), (1, 4, 8, 8), 4 * 8 + 8 * 8 + 4 * 8),
        ("row", ((cut(1), cut(0)), (PARTIAL,)), (1, 4, 16, 4), 4 * 4 + 4 * 16 + 4 * 16),
    ],
)
def test_a_product_is_asked_at_its_local_shape(linear, label, states, forward, share) -> None:  # type: ignore[no-untyped-def]
    asked = Asked()
    op = linear.ops[-1]
    axis = next(axis for axis in axes_of(op, linear) if axis.label == label)
    assert asked.costs().way_ns(op, linear, *states, axis, 2) == 3
    product, by_input, by_weight = asked.works
    batch, m, n, k = forward
    assert product.dims == forward and product.flops == 2 * 4 * 8 * 16 // 2
    assert product.bytes == 8 * share
    assert (by_input.dims, by_weight.dims) == ((batch, m, k, n), (batch, k, n, m))
    assert by_input.phase == by_weight.phase == "backward"


def test_whole_it_is_asked_as_it_was_traced(linear: SplitGraph) -> None:
    asked = Asked()
    asked.costs().way_ns(linear.ops[-1], linear, (WHOLE, WHOLE), (WHOLE,), None, 2)
    assert asked.works[0].dims == (1, 4, 16, 8)


def test_a_view_takes_no_time(linear: SplitGraph) -> None:
    asked = Asked()
    assert asked.costs().way_ns(linear.ops[0], linear, (cut(0),), (cut(1),), None, 2) == 0
    assert not asked.works


def test_a_change_moves_the_full_buffer_in_each_pass() -> None:
    asked = Asked()
    tensor = FlowTensor(shape=(4, 8), num_bytes=256, needs_grad=True)
    assert asked.costs().change_ns(Change("all_gather", "reduce_scatter"), tensor, 4) == 512
    assert asked.costs().change_ns(Change("all_to_all", ""), tensor, 4) == 64
    assert asked.collectives == [("all_gather", 256), ("reduce_scatter", 256), ("all_to_all", 64)]


def test_a_parameters_gradient_is_summed_once_with_all_others() -> None:
    asked = Asked()
    weight = FlowTensor(shape=(4, 8), num_bytes=256, needs_grad=True, parameter="w")
    assert asked.costs().change_ns(Change("", "all_reduce"), weight, 4) == 256
    assert not asked.collectives
