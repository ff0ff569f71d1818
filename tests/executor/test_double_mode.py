from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from claw_plan.executor.double_mode import DoubleMode, drawn_as_outside
from claw_plan.executor.recompute import recompute
from claw_plan.executor.torch_private import fake_mode
from claw_plan.executor.whole_model import DOUBLE


def test_in_double_mode_nothing_falls_back_to_single() -> None:
    value = torch.full((2,), 1 / 3, dtype=torch.float64)
    with DoubleMode():
        results = [
            value.float(),
            value.to(torch.float32),
            value.type(torch.float32),
            torch.softmax(value, 0, dtype=torch.float32),
            torch.zeros(2, dtype=torch.float32),
        ]
    assert {result.dtype for result in results} == {torch.float64}
    assert value.float().dtype == torch.float32


def test_floats_made_of_integers_are_double() -> None:
    with DoubleMode():
        assert (torch.arange(3) * 0.5).dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32


def test_what_is_recomputed_in_backward_stays_double_too() -> None:
    class FallsBack(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.float().exp().sin().type(x.dtype)

    block, x = FallsBack(), torch.ones(2, dtype=torch.float64, requires_grad=True)
    recompute(block, "full", DOUBLE)
    with DoubleMode():
        block(x).sum().backward()
    expected = torch.ones(2, dtype=torch.float64).exp()
    torch.testing.assert_close(x.grad, expected * expected.cos(), rtol=0, atol=1e-14)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


SHAPES = [
    ((12, 4), (4, 4, 8)),  # rows of each expert, as in its forward
    ((4, 12), (12, 8)),  # and its weight's gradient
    ((4, 8, 4), (4, 12)),
    ((4, 2, 4), (4, 4, 8)),
]


@pytest.mark.parametrize(("a_shape", "b_shape"), SHAPES)
def test_grouped_products_are_those_of_torch_in_double(
    a_shape: tuple[int, ...], b_shape: tuple[int, ...]
) -> None:
    """Against torch's own in single; one of the groups is empty."""
    a, b = normal(*a_shape), normal(*b_shape)
    ragged = len(a_shape) + len(b_shape) < 6
    offs = torch.tensor([3, 3, 8, 12], dtype=torch.int32) if ragged else None
    with DoubleMode():
        product = F.grouped_mm(a, b, offs=offs)
        private = torch._grouped_mm(a, b, offs=offs)
    expected = F.grouped_mm(a.float(), b.float(), offs=offs)
    assert product.dtype == torch.float64 and torch.equal(product, private)
    torch.testing.assert_close(product.float(), expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn_like(expected)
    ours = torch.autograd.grad((product * weights).sum(), (a, b))
    theirs = torch.autograd.grad((expected * weights).sum(), (a, b))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_grouped_products_need_no_values() -> None:
    with fake_mode(), DoubleMode():
        a, b = (torch.empty(shape, dtype=torch.float64) for shape in SHAPES[0])
        ends = torch.empty(4, dtype=torch.int32)
        assert F.grouped_mm(a, b, offs=ends).shape == (12, 8)


def test_weights_are_drawn_as_outside() -> None:
    torch.manual_seed(3)
    expected = torch.nn.Linear(5, 7).weight
    with DoubleMode(), DoubleMode():
        torch.manual_seed(3)
        with drawn_as_outside():
            drawn = torch.nn.Linear(5, 7).weight
        assert torch.ones(1).dtype == torch.float64
    assert torch.equal(drawn, expected)
    assert torch.ones(1).dtype == torch.float32 and DoubleMode.outside is None
