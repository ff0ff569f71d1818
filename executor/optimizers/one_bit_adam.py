"""1-bit Adam: AdamW while it warms up, then momentum in compressed form under frozen variances.

In step t > warmup_steps rank i has m_i = β₁ m + (1-β₁) g_i from its own gradient, and m becomes
the mean of all m_i through a codec with error feedback at worker and server. The second moments v
stay what they were after the warm-up, so the step is linear in m and errors fed back cancel, which
they would not in a v made of compressed gradients.

What travels is the momentum in units of the step, m / (√v̂ + ε): one scale then serves elements
whose gradients differ by orders of magnitude. With `preconditioned=False` it is m itself, as in
the article. Elements whose gradient was zero in all of the warm-up (rows of tables that no sample
used) neither travel nor move: divided by ε alone they would leave every bound.

Sources: Tang et al., "1-bit Adam", ICML 2021, algorithm 1; DeepSpeed's runtime/fp16/onebit/adam.py
for the mask. Unlike DeepSpeed's it decays weights apart from the gradient and corrects biases, so
that as long as it warms up it is torch's AdamW to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.optim.adamw import adamw

from claw_plan.executor.optimizers.buckets import Bucket
from claw_plan.executor.optimizers.compressed import CompressedOptimizer, Parameters, gradients


class OneBitAdam(CompressedOptimizer):
    """AdamW whose momentum travels through `codec`, one bit for each element unless said."""

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        codec: str = "one_bit",
        warmup_steps: int,
        preconditioned: bool = True,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            params, defaults, codec=codec, warmup_steps=warmup_steps, group=group, **options
        )
        self.preconditioned = preconditioned
        self._frozen_rates: dict[str, torch.Tensor] = {}

    def _step_group(self, group: dict[str, Any], buckets: Sequence[Bucket]) -> None:
        parameters = [p for bucket in buckets for p in bucket.parameters]
        if self.meets_gradients:
            adamw_step(self, group, parameters)
            return
        for bucket in buckets:
            self._step_bucket(group, bucket)

    def _step_bucket(self, group: dict[str, Any], bucket: Bucket) -> None:
        beta1, _ = group["betas"]
        step = self._exchange_momentum(group, bucket)
        decay_and_move(group, bucket, step, 1 - beta1 ** (self.steps_done + 1))
        for parameter in bucket.parameters:
            self.state[parameter]["step"] += 1

    def _exchange_momentum(self, group: dict[str, Any], bucket: Bucket) -> torch.Tensor:
        """Makes the momentum the mean of all ranks'; the step along it, before bias correction."""
        momentum = self.momentum(bucket)
        own, rate = self._mixed(group, bucket), self._rate(group, bucket)
        if self.preconditioned:
            own *= rate
        mean = self.mean_of_step(bucket, own)
        if not self.preconditioned:
            torch._foreach_copy_(momentum, bucket.split(mean))
            return mean * rate
        units = bucket.split(divisor(bucket, rate))
        for old, new, unit in zip(momentum, bucket.split(mean), units, strict=True):
            torch.div(new, unit, out=old)
        return mean

    def _mixed(self, group: dict[str, Any], bucket: Bucket) -> torch.Tensor:
        """What the momentum becomes by this rank's gradients alone, as a new vector."""
        beta1, _ = group["betas"]
        momentum = self.momentum(bucket)
        own = momentum[0].new_empty(bucket.numel)
        parts = zip(bucket.split(own), momentum, gradients(bucket), strict=True)
        for part, old, gradient in parts:
            torch.lerp(old, gradient, 1 - beta1, out=part)
        return own

    def mean_of_step(self, bucket: Bucket, own: torch.Tensor) -> torch.Tensor:
        """The mean over all ranks of what travels, zero for elements that do not."""
        mean = bucket.unpacked(self.means.compressed(bucket.key, bucket.packed(own)))
        self.make_alike(bucket, mean)
        return mean

    def momentum(self, bucket: Bucket) -> list[torch.Tensor]:
        """The parameters' first moments."""
        for parameter in bucket.parameters:
            prepare(self, parameter)
        return [self.state[parameter]["exp_avg"] for parameter in bucket.parameters]

    def _rate(self, group: dict[str, Any], bucket: Bucket) -> torch.Tensor:
        """What the step takes of a momentum, as it was after the warm-up and stays."""
        rate = self._frozen_rates.get(bucket.key)
        if rate is None:
            squares = bucket.flat([self.state[p]["exp_avg_sq"] for p in bucket.parameters])
            rate = self._rate_of(group, squares, self.renewals_of_variance)
            bucket.leave_out(rate > 0)
            self._frozen_rates[bucket.key] = rate
        return rate

    def _rate_of(self, group: dict[str, Any], squares: torch.Tensor, count: int) -> torch.Tensor:
        """1 / (√v̂ + ε) of second moments after so many steps; 0 where no gradient ever was."""
        _, beta2 = group["betas"]
        denominator = (squares / (1 - beta2**count)).sqrt() + group["eps"]
        return torch.where(squares > 0, 1 / denominator, 0)

    @property
    def renewals_of_variance(self) -> int:
        """Gradients that the frozen second moments are made of."""
        return self.warmup_steps

    def forget_derived(self) -> None:
        """As that of all; the variances may be others too."""
        super().forget_derived()
        self._frozen_rates.clear()


def divisor(bucket: Bucket, rate: torch.Tensor) -> torch.Tensor:
    """The rate, to divide by: 1 where nothing travels and it is zero."""
    return rate if bucket.active is None else rate.where(rate > 0, 1)


def prepare(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """AdamW's state of a parameter, begun where there is none."""
    state: dict[str, torch.Tensor] = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return state


def adamw_step(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: Sequence[nn.Parameter]
) -> None:
    """The step of torch's AdamW, by its own function."""
    reached = [parameter for parameter in parameters if parameter.grad is not None]
    states = [prepare(optimizer, parameter) for parameter in reached]
    beta1, beta2 = group["betas"]
    adamw(
        reached,  # type: ignore[arg-type]  # parameters are tensors
        [parameter.grad for parameter in reached if parameter.grad is not None],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"],
        weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
    )  # fmt: skip


def decay_and_move(
    group: dict[str, Any], bucket: Bucket, step: torch.Tensor, bias_correction: float
) -> None:
    """Lets the weights decay, then moves them against `step`, as AdamW does."""
    parameters: list[torch.Tensor] = list(bucket.parameters)
    torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
    rate = -group["lr"] / bias_correction
    torch._foreach_add_(parameters, bucket.split(step), alpha=rate)
