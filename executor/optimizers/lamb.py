"""LAMB: Adam's step of each layer, scaled so that it moves by a share of the layer's own norm.

    u = m̂ / (√v̂ + ε) + λ x,   x ← x - γ · clamp(|x| / |u|) · u

Norms are those of whole parameters, so every rank that updates one holds all of it. Without a
weight or a step to compare (|x| or |u| is zero) the scale is 1.

Source: You et al., "Large Batch Optimization for Deep Learning", arXiv 1904.00962, algorithm 2,
with φ a clamp of the ratio as in DeepSpeed's FusedLamb (min_coeff 0.01, max_coeff 10).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from claw_plan.executor.gradients import local
from claw_plan.executor.optimizers.compressed import loss_of
from claw_plan.executor.optimizers.one_bit_adam import prepare

COEFFICIENTS = (0.01, 10.0)
"""Bounds of |x| / |u|."""


class Lamb(torch.optim.Optimizer):
    """LAMB over parameters that this rank holds whole."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        coefficients: tuple[float, float] = COEFFICIENTS,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self.coefficients = coefficients

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step from the parameters' gradients; those without one stay."""
        loss = loss_of(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = prepare(self, parameter)
                    own = {name: local(value) for name, value in state.items()}
                    gradient = local(parameter.grad)
                    lamb_step(group, local(parameter), gradient, own, self.coefficients)
        return loss


def lamb_step(
    group: Mapping[str, Any],
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    coefficients: tuple[float, float],
) -> torch.Tensor:
    """Moves one parameter and its moments; answers with the scale of the step."""
    beta1, beta2 = group["betas"]
    state["step"].add_(1)
    count = state["step"].item()
    state["exp_avg"].lerp_(gradient, 1 - beta1)
    squares = state["exp_avg_sq"].mul_(beta2)
    squares.addcmul_(gradient, gradient, value=1 - beta2)
    denominator = (squares / (1 - beta2**count)).sqrt() + group["eps"]
    step = state["exp_avg"] / (denominator * (1 - beta1**count))
    step.add_(parameter, alpha=group["weight_decay"])
    scale = trust(parameter, step, coefficients)
    parameter.sub_(step * scale, alpha=group["lr"])
    return scale


def trust(
    parameter: torch.Tensor, step: torch.Tensor, coefficients: tuple[float, float]
) -> torch.Tensor:
    """|x| / |u| within bounds; 1 where either is nothing."""
    weight, moved = parameter.norm(), step.norm()
    ratio = (weight / moved.where(moved > 0, 1)).clamp(*coefficients)
    return torch.where((weight > 0) & (moved > 0), ratio, torch.ones_like(ratio))
