"""0/1 Adam: variances are renewed ever more seldom, then ranks meet ever more seldom.

Of its first `warmup_steps` those at distances 2^⌊j/κ⌋ exchange whole gradients and renew the
second moments; the others exchange gradients through the codec and change the first moments alone.
Afterwards each rank steps from its own gradients and only now and then, at distances of the same
kind, do all replace what they moved since they last met by its mean through the codec:

    u_i = Σ γ m_i / (√v̂ + ε),   x = x_met - mean(u_i),   m = mean(u_i) (√v̂ + ε) / Σ γ

With κ beyond all steps and a meeting at every step it is 1-bit Adam. Between meetings replicas
differ: `replicas_are_equal` says when they do not.

Source: Lu et al., arXiv 2202.06009, algorithm 1 and section 6; DeepSpeed's
runtime/fp16/onebit/zoadam.py, which takes x_met from x_i and so lets replicas drift apart by
rounding. Here x_met is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.optimizers.buckets import Bucket
from claw_plan.executor.optimizers.compressed import Parameters, gradients
from claw_plan.executor.optimizers.intervals import count_marked, is_marked
from claw_plan.executor.optimizers.one_bit_adam import (
    OneBitAdam,
    adamw_step,
    decay_and_move,
    divisor,
)


@dataclass(slots=True)
class _Away:
    """A bucket since its ranks last met: the parameters then, what this rank moved, Σ γ."""

    met: torch.Tensor
    moved: torch.Tensor
    rates: float = 0.0


class ZeroOneAdam(OneBitAdam):
    """1-bit Adam with fewer variances and fewer meetings.

    Distances between renewals of variances double after every `variance_repeats`, between
    meetings after every `meeting_repeats`, up to `longest_away` steps.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        warmup_steps: int,
        variance_repeats: int = 16,
        meeting_repeats: int = 16,
        longest_away: int = 16,
        **options: Any,
    ) -> None:
        self.variance_repeats = variance_repeats
        self.meeting_repeats, self.longest_away = meeting_repeats, longest_away
        super().__init__(
            params, lr, betas, eps, weight_decay, warmup_steps=warmup_steps, **options
        )
        self._away: dict[str, _Away] = {}

    @property
    def meets_gradients(self) -> bool:
        """Whether the coming step renews the variances."""
        step = self.steps_done
        return step < self.warmup_steps and is_marked(step, self.variance_repeats)

    @property
    def meets(self) -> bool:
        """Whether ranks meet in the coming step, in whatever form."""
        away = self.steps_done + 1 - self.warmup_steps
        return away <= 0 or is_marked(away, self.meeting_repeats, self.longest_away)

    @property
    def renewals_of_variance(self) -> int:
        """Gradients that the frozen second moments are made of."""
        return count_marked(self.warmup_steps, self.variance_repeats)

    @property
    def replicas_are_equal(self) -> bool:
        """Whether all ranks have the same parameters now."""
        return not self._away

    def _step_group(self, group: dict[str, Any], buckets: Sequence[Bucket]) -> None:
        renewed = count_marked(self.steps_done, self.variance_repeats)
        if self.meets_gradients and renewed == self.steps_done:
            adamw_step(self, group, [p for bucket in buckets for p in bucket.parameters])
            return
        for bucket in buckets:
            momentum = self.momentum(bucket)
            if self.steps_done < self.warmup_steps:
                self._step_together(group, bucket, momentum, renewed)
            else:
                self._step_apart(group, bucket, momentum)
            for parameter in bucket.parameters:
                self.state[parameter]["step"] += 1

    def _step_together(
        self, group: dict[str, Any], bucket: Bucket, momentum: list[torch.Tensor], renewed: int
    ) -> None:
        beta1, beta2 = group["betas"]
        own = bucket.flat(gradients(bucket))
        squares = [self.state[p]["exp_avg_sq"] for p in bucket.parameters]
        if self.meets_gradients:
            new = bucket.flat(squares).mul_(beta2).addcmul_(own, own, value=1 - beta2)
            torch._foreach_copy_(squares, bucket.split(new))
            renewed += 1
        rate = self._rate_of(group, bucket.flat(squares), renewed)
        if not self.meets_gradients:
            scale = rate if self.preconditioned else (rate > 0).to(rate.dtype)
            mean = self.means.compressed(f"{bucket.key}.gradients", own * scale)
            own = torch.where(scale > 0, mean / scale, 0)
        new = bucket.flat(momentum).lerp_(own, 1 - beta1)
        torch._foreach_copy_(momentum, bucket.split(new))
        decay_and_move(group, bucket, new * rate, 1 - beta1 ** (self.steps_done + 1))

    def _step_apart(
        self, group: dict[str, Any], bucket: Bucket, momentum: list[torch.Tensor]
    ) -> None:
        self.means.feedback.pop(f"{bucket.key}.gradients", None)  # of gradients, not of steps
        rate = self._rate(group, bucket)
        own = self._mixed(group, bucket)
        away = self._away.get(bucket.key)
        if away is None:
            met = bucket.flat([parameter.detach() for parameter in bucket.parameters])
            away = self._away[bucket.key] = _Away(met, torch.zeros_like(met))
        remains = 1 - group["lr"] * group["weight_decay"]
        away.met *= remains
        away.moved.mul_(remains).add_(own * rate, alpha=group["lr"])
        away.rates += group["lr"]
        if self.meets:
            own = self._take_mean(bucket, rate)
        torch._foreach_copy_(momentum, bucket.split(own))
        self._move(group, bucket, away, self.steps_done + 1)

    def _take_mean(self, bucket: Bucket, rate: torch.Tensor) -> torch.Tensor:
        """Lets the ranks' moves become their mean; the momentum that would have made it."""
        away = self._away.pop(bucket.key)
        away.moved = self._mean_of_moves(bucket, away.moved, rate)
        return away.moved / (away.rates * divisor(bucket, rate))

    def _move(self, group: dict[str, Any], bucket: Bucket, away: _Away, steps: int) -> None:
        """Puts the parameters where those moves lead from where the ranks last met."""
        correction = 1 - group["betas"][0] ** steps
        now = away.met.add(away.moved, alpha=-1 / correction)
        parameters: list[torch.Tensor] = list(bucket.parameters)
        torch._foreach_copy_(parameters, bucket.split(now))

    @torch.no_grad()
    def meet(self) -> None:
        """Lets ranks meet out of turn, where something is kept of them; all call it together."""
        for group, buckets in zip(self.param_groups, self.buckets, strict=True):
            for bucket in buckets:
                away = self._away.get(bucket.key)
                if away is not None:
                    own = self._take_mean(bucket, self._rate(group, bucket))
                    torch._foreach_copy_(self.momentum(bucket), bucket.split(own))
                    self._move(group, bucket, away, self.steps_done)

    def _mean_of_moves(
        self, bucket: Bucket, moved: torch.Tensor, rate: torch.Tensor
    ) -> torch.Tensor:
        """In units of the momentum where that is what travels."""
        scale = 1 if self.preconditioned else divisor(bucket, rate)
        packed = bucket.packed(moved / scale)
        return bucket.unpacked(self.means.compressed(bucket.key, packed)) * scale

    def rank_state(self) -> dict[str, torch.Tensor]:
        """As of 1-bit Adam; raises ExecutionError between meetings, when replicas differ."""
        if not self.replicas_are_equal:
            raise ExecutionError(
                f"after step {self.steps_done} replicas of 0/1 Adam differ until they meet; save "
                "where optimizer.replicas_are_equal"
            )
        return super().rank_state()

    def load_rank_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """As of 1-bit Adam; what this rank moved since its ranks met is dropped."""
        self._away.clear()
        super().load_rank_state(state)
