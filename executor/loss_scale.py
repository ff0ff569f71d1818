"""Dynamic loss scaling for fp16, whose small gradients would otherwise be zero.

The loss is multiplied by a power of two before backward and gradients divided by it before the
step. A step whose gradients overflow is left out and the scale halved; after many good steps it
is doubled. Source: Micikevicius et al., "Mixed Precision Training" (arXiv 1710.03740, 3.2);
the constants are those of torch.amp.GradScaler.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn as nn

from claw_plan.executor.gradients import local

START = 2.0**16
GROWTH_STEPS = 2000


class LossScale:
    """The scale, the same on all ranks because all see whether any gradient overflowed."""

    def __init__(self) -> None:
        self.factor = START
        self._good_steps = 0

    def divide(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Divides the gradients, once they are complete; whether the step may be taken."""
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        finite = [gradient.isfinite().all() for gradient in gradients]
        device = gradients[0].device if gradients else torch.device("cpu")
        is_good = torch.tensor(float(all(bool(one) for one in finite)), device=device)
        dist.all_reduce(is_good, op=dist.ReduceOp.MIN)
        for gradient in gradients:
            gradient.div_(self.factor)
        return self._adapt(is_good=bool(is_good.item()))

    def _adapt(self, *, is_good: bool) -> bool:
        if not is_good:
            self.factor, self._good_steps = self.factor / 2, 0
            return False
        self._good_steps += 1
        if self._good_steps == GROWTH_STEPS:
            self.factor, self._good_steps = self.factor * 2, 0
        return True
