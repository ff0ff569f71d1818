"""Functions that modules keep compute with the copy's parameters, and leave the original alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn

from claw_plan.executor.model_copy import copied


class Closed(nn.Module):
    """As minGPT's blocks: the forward goes by a function that holds the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        first, both = self.layers[0], [self.layers[1]]

        def inner(x: torch.Tensor, depth: int = 0) -> torch.Tensor:
            return inner(x, depth + 1) if depth < 1 else first(x)

        self.call: Callable[[torch.Tensor], torch.Tensor] = lambda x: both[0](inner(x))
        self.register_forward_hook(lambda module, args, output: output + first.bias.sum())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)


def test_a_copy_shares_nothing() -> None:
    model = Closed()
    own, x = copied(model), torch.randn(2, 3)
    assert torch.equal(own(x), model(x))
    own(x).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in own.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert not model(x).any() and own(x).any()


def test_what_the_model_has_no_part_in_stays_the_same() -> None:
    outside = torch.ones(3)
    model = nn.Linear(3, 3)
    model.shift = lambda x: x + outside
    own = copied(model)
    assert own.shift.__closure__[0].cell_contents is outside
    assert copied(nn.Sequential(nn.GELU(), nn.Linear(3, 3)))[1].weight.shape == (3, 3)
