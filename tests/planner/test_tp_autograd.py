import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.planner.errors import PlanError
from claw_plan.planner.tp_autograd import (
    StandIn,
    enter,
    gather_from_sequence,
    gather_sequence,
    reduce,
    reduce_scatter_sequence,
    scatter_to_sequence,
)

FUNCTIONS = (
    (enter, [], ["all_reduce"], 1),
    (reduce, ["all_reduce"], [], 1),
    (gather_sequence, ["all_gather"], ["reduce_scatter"], "longer"),
    (reduce_scatter_sequence, ["reduce_scatter"], ["all_gather"], "shorter"),
    (scatter_to_sequence, [], ["all_gather"], "shorter"),
    (gather_from_sequence, ["all_gather"], [], "longer"),
)


@pytest.mark.parametrize(("function", "forward", "backward", "length"), FUNCTIONS)
@given(degree=st.sampled_from([1, 2, 4]), batch=st.integers(1, 3), chunk=st.integers(1, 3))
@settings(max_examples=15, deadline=None)
def test_shapes_and_collectives_of_both_passes(
    function, forward, backward, length, degree, batch, chunk
):
    seen = []
    ranks = StandIn(
        degree, degree - 1, exchange=lambda op, size, where: seen.append((op, size, where))
    )
    tensor = torch.randn(batch, degree * chunk, 5, requires_grad=True)
    result = function(tensor, ranks, "attn")
    ratio = {"longer": degree, "shorter": 1 / degree}.get(length, 1)
    assert result.shape == (batch, int(degree * chunk * ratio), 5)
    full = 4 * max(tensor.numel(), result.numel())
    assert seen == [(op, full, "attn") for op in forward]
    seen.clear()
    result.sum().backward()
    assert tensor.grad.shape == tensor.shape
    assert seen == [(op, full, "attn") for op in backward]


def test_scatter_and_gather_keep_the_ranks_own_part():
    ranks = StandIn(2, 1)
    tensor = torch.arange(8.0).view(1, 4, 2).requires_grad_()
    assert torch.equal(scatter_to_sequence(tensor, ranks), tensor[:, 2:])
    part = torch.zeros(1, 2, 2, requires_grad=True)
    gather_from_sequence(part, ranks).backward(tensor.detach())
    assert torch.equal(part.grad, tensor.detach()[:, 2:])


def test_a_shared_gradient_is_not_overwritten():
    class Doubling(StandIn):
        def all_reduce(self, tensor, where):
            return tensor.mul_(2)

    tensor, gradient = torch.zeros(3, requires_grad=True), torch.ones(3)
    enter(tensor, Doubling(2), "", keep_gradient=True).backward(gradient)
    assert (tensor.grad.tolist(), gradient.tolist()) == ([2, 2, 2], [1, 1, 1])


def test_a_sequence_that_does_not_divide_says_what_to_do():
    with pytest.raises(PlanError, match="a sequence of 5 in attn does not divide by 2; choose"):
        scatter_to_sequence(torch.zeros(1, 5, 2), StandIn(2), "attn")


def test_a_stand_in_exchanges_as_much_as_it_has():
    seen = []
    ranks = StandIn(4, exchange=lambda op, size, where: seen.append((op, size, where)))
    assert ranks.all_to_all(torch.ones(8, 3), "experts").shape == (8, 3)
    assert seen == [("all_to_all", 96, "experts")]
