"""1-bit Adam's scheme with PowerSGD in place of bits: the momentum's mean through thin matrices.

Of the momentum, a mean over many steps, a matrix of low rank keeps more than of a single gradient,
and second moments never see what was left out; `attach_power_sgd` sends gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from claw_plan.executor.communication.power_sgd import LowRankMean
from claw_plan.executor.optimizers.buckets import Bucket
from claw_plan.executor.optimizers.compressed import Parameters
from claw_plan.executor.optimizers.one_bit_adam import OneBitAdam


class PowerSgdAdam(OneBitAdam):
    """AdamW whose momentum travels as two matrices of `rank` columns for each parameter."""

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
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay,
            codec="none", warmup_steps=warmup_steps, group=group, **options,
        )  # fmt: skip
        means = self.means
        self._low_rank = LowRankMean(
            means.group, rank, algorithm=means.algorithm, nodes=means.nodes
        )
        numbered = enumerate(self._parameters())
        self._numbers = {id(parameter): number for number, parameter in numbered}

    def mean_of_step(self, bucket: Bucket, own: torch.Tensor) -> torch.Tensor:
        """The mean over all ranks, whole elements of a matrix left out nowhere but in the end."""
        numbers = [self._numbers[id(parameter)] for parameter in bucket.parameters]
        self._low_rank.average(numbers, bucket.split(own))
        return bucket.unpacked(bucket.packed(own))

    def rank_state(self) -> dict[str, torch.Tensor]:
        """Errors and factors of this rank."""
        return self._low_rank.rank_state()

    def load_rank_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes up the `rank_state` of the same rank of as many, once `state` is loaded."""
        self._low_rank.load_rank_state(state)
        self.forget_derived()
