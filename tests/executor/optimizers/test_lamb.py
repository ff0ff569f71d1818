"""LAMB against the article's algorithm in numpy, in fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn as nn

from claw_plan.executor.optimizers.lamb import Lamb, trust
from claw_plan.executor.optimizers.one_bit_lamb import COEFFICIENT, OneBitLamb
from claw_plan.executor.ranks import Rank

RATE, DECAY, EPS = 0.02, 0.01, 1e-8


def article(
    weight: np.ndarray, gradients: list[np.ndarray], bounds: tuple[float, float]
) -> np.ndarray:
    """Algorithm 2 with bias correction and φ(|x|) / |u| clamped."""
    m, v = np.zeros_like(weight), np.zeros_like(weight)
    for count, gradient in enumerate(gradients, 1):
        m = 0.9 * m + 0.1 * gradient
        v = 0.999 * v + 0.001 * gradient**2
        step = m / (1 - 0.9**count) / (np.sqrt(v / (1 - 0.999**count)) + EPS) + DECAY * weight
        ratio = np.clip(np.linalg.norm(weight) / np.linalg.norm(step), *bounds)
        weight = weight - RATE * ratio * step
    return weight


def test_each_layer_moves_as_the_article_has_it() -> None:
    rng = np.random.default_rng(0)
    starts = [rng.normal(size=(7, 5)), 30 * rng.normal(size=(11,)), 1e-4 * rng.normal(size=(3, 4))]
    steps = [[rng.normal(size=start.shape) for _ in range(6)] for start in starts]
    parameters = [nn.Parameter(torch.tensor(start)) for start in starts]
    optimizer = Lamb(parameters, lr=RATE, weight_decay=DECAY)
    for gradients in zip(*steps, strict=True):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = torch.tensor(gradient)
        optimizer.step()
    for parameter, start, gradients in zip(parameters, starts, steps, strict=True):
        expected = article(start, gradients, (0.01, 10.0))
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-12)


def test_a_layer_of_zeros_moves_like_adams() -> None:
    """Nothing to compare with: the scale is 1."""
    zero, one = torch.zeros(4), torch.ones(4)
    assert trust(zero, one, (0.01, 10.0)) == trust(one, zero, (0.01, 10.0)) == 1
    assert trust(one, 100 * one, (0.05, 10.0)) == torch.tensor(0.05)


def test_what_has_no_gradient_stays() -> None:
    parameter = nn.Parameter(torch.ones(3))
    Lamb([parameter]).step()
    assert torch.equal(parameter.detach(), torch.ones(3))


def test_layers_travel_in_units_of_what_they_are_moved_by(
    alone: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """c m / (√v̂ + ε) by layer, so that noise of one size is as much in all; the mean returns."""
    torch.manual_seed(0)
    starts = (30 * torch.randn(8, 4), 0.1 * torch.randn(16))
    parameters = [nn.Parameter(start.clone()) for start in starts]
    optimizer = OneBitLamb(parameters, lr=1e-3, warmup_steps=1)
    first, second = ([torch.randn_like(p) for p in parameters] for _ in range(2))
    sent: list[torch.Tensor] = []

    def compressed(key: str, flat: torch.Tensor) -> torch.Tensor:
        sent.append(flat.clone())
        return flat.clone()

    monkeypatch.setattr(optimizer.means, "compressed", compressed)
    for gradients in (first, second):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    coefficients = [optimizer.state[p][COEFFICIENT].item() for p in parameters]
    assert coefficients[0] > 100 * coefficients[1]
    expected = []
    for c, parameter, old, new in zip(coefficients, parameters, first, second, strict=True):
        momentum = 0.9 * 0.1 * old + 0.1 * new
        torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], momentum)
        expected.append((c * momentum / (old.abs() + EPS)).reshape(-1))
    torch.testing.assert_close(sent[0], torch.cat(expected), rtol=1e-4, atol=1e-5)
