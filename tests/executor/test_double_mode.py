from __future__ import annotations

import torch
import torch.nn as nn

from claw_plan.executor.double_mode import DoubleMode
from claw_plan.executor.recompute import recompute
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
