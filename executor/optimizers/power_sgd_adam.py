"""1-bit Adam's scheme with PowerSGD in place of bits: how the momentum changed, as thin matrices.

Each rank keeps the momentum m_i of its own gradients, and all keep one momentum h that is the same
everywhere and that steps are made of. What travels is the difference, of low rank,

    m_i = β₁ m_i + (1-β₁) g_i,   h = h + C(mean(m_i - h))

so whatever a step leaves out is in the next difference, and nothing adds up. Feeding errors back
into the momentum, as 1-bit Adam does, delays far more where most is left out: what arrives decays
by β₁ only when its direction is sent again. Second moments, kept from the warm-up, never see what
was left out.

Sources: Vogels et al., "PowerSGD", arXiv 1905.13727, for C; Richtárik et al., "EF21", arXiv
2106.05203, for differences from what is known everywhere in place of errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from claw_plan.executor.communication.power_sgd import LowRankMean
from claw_plan.executor.optimizers.buckets import Bucket
from claw_plan.executor.optimizers.compressed import Parameters, gradients
from claw_plan.executor.optimizers.one_bit_adam import OneBitAdam

OWN = "own."
"""Before the bucket's key: the momentum of this rank."""


class PowerSgdAdam(OneBitAdam):
    """AdamW whose momentum travels as two matrices of `rank` columns for each parameter.

    `factors` is the codec of these matrices.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        rank: int,
        warmup_steps: int,
        factors: str = "none",
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay,
            codec="none", warmup_steps=warmup_steps, group=group, **options,
        )  # fmt: skip
        means = self.means
        self._low_rank = LowRankMean(
            means.group, rank, codec=factors, keeps_errors=False,
            algorithm=means.algorithm, nodes=means.nodes,
        )  # fmt: skip
        numbered = enumerate(self._parameters())
        self._numbers = {id(parameter): number for number, parameter in numbered}
        self._own: dict[str, torch.Tensor] = {}

    def _exchange_momentum(self, group: dict[str, Any], bucket: Bucket) -> torch.Tensor:
        """Takes the common momentum towards the mean of all ranks'; the step along it."""
        beta1, _ = group["betas"]
        momentum, rate = self.momentum(bucket), self._rate(group, bucket)
        common = bucket.flat(momentum)
        own = self._own.setdefault(bucket.key, common.clone())
        own.lerp_(bucket.flat(gradients(bucket)), 1 - beta1)
        scale = rate if self.preconditioned else (rate > 0).to(rate.dtype)
        change = (own - common) * scale
        numbers = [self._numbers[id(parameter)] for parameter in bucket.parameters]
        self._low_rank.average(numbers, bucket.split(change))
        common += torch.where(scale > 0, change / scale, 0)
        torch._foreach_copy_(momentum, bucket.split(common))
        return common * rate

    def rank_state(self) -> dict[str, torch.Tensor]:
        """The momentum of this rank, and factors."""
        own = {f"{OWN}{key}": momentum for key, momentum in self._own.items()}
        return self._low_rank.rank_state() | own

    def load_rank_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes up the `rank_state` of the same rank of as many, once `state` is loaded.

        Without any, ranks begin at the momentum that is common to all.
        """
        factors = {name: tensor for name, tensor in state.items() if not name.startswith(OWN)}
        self._low_rank.load_rank_state(factors)
        self._own = {
            name.removeprefix(OWN): tensor.clone()
            for name, tensor in state.items()
            if name.startswith(OWN)
        }
        self.forget_derived()
