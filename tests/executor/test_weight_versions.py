"""Two versions of weights in one process, against autograd and the recursion's own stability."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn as nn

from claw_plan.executor.weight_versions import WeightVersions, lower_inputs


def test_a_graph_in_flight_finds_its_weights_after_an_update() -> None:
    """Forward at W(0), an update, then backward: the gradient is that of W(0)."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 3, dtype=torch.double)
    parameters = [*layer.parameters()]
    before = [p.detach().clone() for p in parameters]
    x = torch.randn(5, 3, dtype=torch.double)
    [expected] = torch.autograd.grad(layer(x).tanh().square().sum(), layer.weight)
    versions = WeightVersions(parameters)
    versions.use(0)
    loss = layer(x).tanh().square().sum()
    versions.show([torch.ones_like(p) for p in parameters])
    versions.update(torch.optim.SGD(parameters, lr=0.5).step)
    for parameter, old in zip(parameters, before, strict=True):
        assert torch.equal(parameter.detach(), old - 0.5)
    versions.use(1)  # W(0) once more
    assert torch.equal(layer.weight.detach(), before[0])
    loss.backward()
    [gradient, _] = versions.take_gradients()
    assert gradient is not None and torch.equal(gradient, expected)
    assert layer.weight.grad is None


def test_without_keeping_versions_autograd_would_refuse() -> None:
    """What `keeping_versions` hides is real where storages do not take turns."""
    layer = nn.Linear(2, 2)
    loss = layer(torch.ones(1, 2)).square().sum() + (layer.weight * layer.weight).sum()
    with torch.no_grad():
        layer.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(("rate", "is_stable"), [(0.98, True), (1.02, False)])
def test_a_quadratic_is_stable_below_half_the_rate_of_plain_descent(
    rate: float, is_stable: bool
) -> None:
    """With delay s descent on L x^2 / 2 is stable iff rate L < 2 sin(pi / (2 (2 s + 1))).

    That is 1 for s = 1, where it is 2 without delay.
    """
    assert math.isclose(2 * math.sin(math.pi / (2 * (2 * 1 + 1))), 1.0)
    x = nn.Parameter(torch.ones((), dtype=torch.double))
    versions, descent = WeightVersions([x]), torch.optim.SGD([x], lr=rate)
    for step in range(600):
        versions.use(step)
        (x.square() / 2).backward()
        versions.show(versions.take_gradients())
        versions.update(descent.step)
    versions.show_newest()
    assert (abs(x.item()) < 1e-2) == is_stable


def test_below_fp32_gradients_of_microbatches_add_up_in_fp32() -> None:
    """1 and eight times 2^-9: bfloat16, whose next number after 1 is 1 + 2^-7, loses them all."""
    weight = nn.Parameter(torch.tensor([1.0 + 2.0**-12]))
    versions = WeightVersions([weight], torch.bfloat16)
    versions.use(0)
    assert weight.dtype is torch.bfloat16 and weight.item() == 1.0
    for gradient in [1.0, *[2.0**-9] * 8]:
        (weight * gradient).sum().backward()
    [added] = versions.take_gradients()
    assert added is not None and added.dtype is torch.float32
    assert added.item() == 1.0 + 8 * 2.0**-9
    versions.show([added])
    assert weight.dtype is torch.float32 and weight.item() == 1.0 + 2.0**-12
    versions.update(torch.optim.SGD([weight], lr=1.0).step)
    versions.use(2)
    assert weight.item() == torch.tensor(2.0**-12 - 2.0**-6).bfloat16().item()


def test_weights_read_from_outside_are_both_versions_or_the_newest() -> None:
    weight = nn.Parameter(torch.zeros(1))
    versions = WeightVersions([weight])
    for before_too, expected in ((False, 0.0), (True, 5.0)):
        versions.show_newest()
        weight.data.fill_(5.0)
        versions.take_newest(before_too=before_too)
        assert versions.before[0].item() == expected


def test_inputs_come_in_the_precision_of_the_kernels() -> None:
    seen: list[torch.dtype] = []

    class Layer(nn.Module):
        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            seen.extend([x.dtype, ids.dtype])
            return x

    layer = Layer()
    lower_inputs([layer], torch.bfloat16)
    layer(torch.ones(1), ids=torch.ones(1, dtype=torch.long))
    assert seen == [torch.bfloat16, torch.int64]
