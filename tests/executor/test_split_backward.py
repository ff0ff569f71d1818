"""Both parts of a split backward together are autograd's whole backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from claw_plan.executor.split_backward import split_backward
from claw_plan.executor.torch_private import TorchDispatchMode


class WeightsOnly(nn.Module):
    """One output depends on a weight alone, which the way from the input reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bias = (self.bias * 2).tanh()
        return self.second(self.first(x) + bias), bias.exp()


class Shared(nn.Module):
    """A weight used twice on the way, with another between."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.once = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.twice(self.once(self.twice(x).tanh()).tanh())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


class OwnParameterOut(nn.Module):
    """An output that is a parameter itself, and one weight that nothing reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.unused = nn.Parameter(torch.randn(4)), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * self.scale, self.scale


class Relay(nn.Module):
    """What was received is also sent on as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), x


class Normed(nn.Module):
    """What is between weight and use (a norm) needs the weight again in the second part."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))


MODELS = [WeightsOnly, Shared, Attention, OwnParameterOut, Relay, Normed]


def outputs_of(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    result = module(x)
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("build", MODELS)
def test_both_parts_are_the_whole(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = build().double()
    x = torch.randn(2, 3, 4, dtype=torch.double, requires_grad=True)
    outputs = outputs_of(module, x)
    gradients = [torch.randn_like(output) for output in outputs]
    torch.autograd.backward(outputs, gradients)
    expected = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    again = x.detach().requires_grad_()
    (of_input, none), late = split_backward(outputs_of(module, again), gradients, [again, "text"])
    assert none is None
    assert all(p.grad is None for p in module.parameters())
    torch.testing.assert_close(of_input, x.grad, rtol=0, atol=1e-14)
    late.run()
    late.run()  # the second time there is nothing left
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-14, msg=name)


def test_torchs_own_split_loses_what_depends_on_weights_alone() -> None:
    """When this fails torch has cured it, and ours may go."""
    torch.manual_seed(0)
    module = WeightsOnly().double()
    x = torch.randn(3, 4, dtype=torch.double, requires_grad=True)
    outputs = list(module(x))
    gradients = [torch.ones_like(output) for output in outputs]
    torch.autograd.backward(outputs, gradients)
    assert module.bias.grad is not None
    expected = module.bias.grad.clone()
    module.zero_grad()
    outputs = list(module(x))
    _, groups = stage_backward_input(outputs, gradients, [x], module.parameters())
    stage_backward_weight(module.parameters(), groups)
    assert (module.bias.grad - expected).abs().max() > 0.1


def test_microbatches_add_up_and_a_loss_needs_no_gradient() -> None:
    torch.manual_seed(0)
    module = Shared().double()
    batches = torch.randn(3, 2, 4, dtype=torch.double)
    module(batches).sum().backward()
    expected = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    late = []
    for batch in batches:
        loss = module(batch.requires_grad_()).sum()
        late.append(split_backward([loss], None, [batch])[1])
        assert loss.grad_fn is None  # the graph is held by the second part alone
    for part in reversed(late):
        part.run()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-13)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def test_each_part_runs_its_own_products_once() -> None:
    """Two Linears: two products forward, two for the inputs, two for the weights."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x = torch.randn(4, 8, requires_grad=True)
    with Products() as products:
        loss = module(x).sum()
        assert products.count == 2
        _, late = split_backward([loss], None, [x])
        assert products.count == 4
        late.run()
        assert products.count == 6
