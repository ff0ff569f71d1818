"""1-bit LAMB: LAMB while it warms up, then 1-bit Adam's momentum with LAMB's layers kept in scale.

LAMB moves a layer by γ c u, where u = m / (√v + ε) + λ x and c = |x| / |u| bounded. After the
warm-up v and c are frozen. Since gradients shrink while v does not, c is corrected by how far v
would have come: from the momentum before and after, the mean gradient is known,
g = (m - β₁ m_before) / (1-β₁), hence a v that goes on, and the layer's largest √v_frozen / √v
corrects c, within `factors` and by at most `factor_threshold` a step.

Source: Li et al., "1-bit LAMB", arXiv 2104.06069, algorithm 1; constants and the part of weight
decay are those of DeepSpeed's runtime/fp16/onebit/lamb.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from claw_plan.executor.optimizers.buckets import Bucket
from claw_plan.executor.optimizers.compressed import Parameters, gradients
from claw_plan.executor.optimizers.lamb import COEFFICIENTS, lamb_step
from claw_plan.executor.optimizers.one_bit_adam import OneBitAdam, prepare

COEFFICIENT, FRESH, FACTOR = "coefficient", "fresh_exp_avg_sq", "factor"


class OneBitLamb(OneBitAdam):
    """LAMB whose momentum travels through a codec after `warmup_steps`."""

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        warmup_steps: int,
        coefficients: tuple[float, float] = COEFFICIENTS,
        coefficient_beta: float = 0.9,
        factors: tuple[float, float] = (0.5, 4.0),
        factor_threshold: float = 0.1,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay,
            warmup_steps=warmup_steps, group=group, **options,
        )  # fmt: skip
        self.coefficients, self.coefficient_beta = coefficients, coefficient_beta
        self.factors, self.factor_threshold = factors, factor_threshold

    def _step_group(self, group: dict[str, Any], buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            if self.meets_gradients:
                self._step_whole(group, bucket)
            else:
                self._step_bucket(group, bucket)

    def _step_whole(self, group: dict[str, Any], bucket: Bucket) -> None:
        for parameter, gradient in zip(bucket.parameters, gradients(bucket), strict=True):
            state = prepare(self, parameter)
            scale = lamb_step(group, parameter, gradient, state, self.coefficients)
            mean, beta = state.get(COEFFICIENT), self.coefficient_beta
            state[COEFFICIENT] = scale if mean is None else mean * beta + scale * (1 - beta)

    def _step_bucket(self, group: dict[str, Any], bucket: Bucket) -> None:
        before = [momentum.clone() for momentum in self.momentum(bucket)]
        rate = self._rate(group, bucket)
        steps = bucket.split(self._exchange_momentum(group, bucket))
        for parameter, old, own, step in zip(
            bucket.parameters, before, bucket.split(rate), steps, strict=True
        ):
            self._step_layer(group, parameter, old, own, step)

    def mean_of_step(self, bucket: Bucket, own: torch.Tensor) -> torch.Tensor:
        """As of 1-bit Adam, each layer in units of what LAMB moves it by.

        A codec's noise is as large in all elements of a part; coefficients would make it up to a
        thousand times as large in one layer as in another. The article scales layers for it, too.
        """
        coefficients = [self.state[p][COEFFICIENT] for p in bucket.parameters]
        torch._foreach_mul_(bucket.split(own), coefficients)
        mean = super().mean_of_step(bucket, own)
        torch._foreach_div_(bucket.split(mean), coefficients)
        return mean

    def _step_layer(
        self,
        group: dict[str, Any],
        parameter: nn.Parameter,
        before: torch.Tensor,
        rate: torch.Tensor,
        adam_step: torch.Tensor,
    ) -> None:
        """Moves one parameter by the frozen coefficient, corrected."""
        beta1, beta2 = group["betas"]
        state = self.state[parameter]
        state["step"] += 1
        gradient = (state["exp_avg"] - beta1 * before) / (1 - beta1)
        fresh = state.setdefault(FRESH, state["exp_avg_sq"].clone()).mul_(beta2)
        fresh.addcmul_(gradient, gradient, value=1 - beta2)
        now = (fresh / (1 - beta2 ** (self.steps_done + 1))).sqrt() + group["eps"]
        step = adam_step / (1 - beta1 ** (self.steps_done + 1))
        decayed = step.add(parameter, alpha=group["weight_decay"])
        ratio = torch.where(rate > 0, 1 / (rate.where(rate > 0, 1) * now), 0).max()
        if group["weight_decay"] > 0:
            share = (step.norm() / decayed.norm().clamp(min=group["eps"])).clamp(max=1)
            ratio = ratio * share + (1 - share)
        last = state.get(FACTOR, torch.ones_like(ratio))
        factor = ratio.clamp(*self.factors)
        threshold = self.factor_threshold
        factor = torch.clamp(factor, last * (1 - threshold), last * (1 + threshold))
        state[FACTOR] = factor
        parameter.sub_(decayed * (state[COEFFICIENT] * factor), alpha=group["lr"])
