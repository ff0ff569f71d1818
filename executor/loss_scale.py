"""Dynamic loss scaling for fp16, whose small gradients would otherwise be zero.

The loss is multiplied by a power of two before backward and gradients divided by it before the
step. A step whose gradients overflow is left out and the scale halved; after a window of good
steps it is doubled. Source: Micikevicius et al., "Mixed Precision Training" (arXiv 1710.03740,
3.2); the constants are those of torch.amp.GradScaler, the floor is DeepSpeed's (min_scale 1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn as nn

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.gradients import local

START = 2.0**16
FLOOR = 1.0
"""Below it gradients overflow by themselves, and no scale helps."""


class LossScale:
    """The scale, the same on all ranks because all see whether any gradient overflowed.

    `window` good steps in a row double it. `good_steps` counts those since it last changed.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.factor = START
        self.good_steps = 0

    def divide(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Divides the gradients, once they are complete; whether the step may be taken.

        Raises ExecutionError when they overflow though the scale is at its floor.
        """
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
            if self.factor <= FLOOR:
                raise ExecutionError(
                    "fp16: gradients still overflow with the loss scale down at "
                    f"{FLOOR:g}, so no step can be taken; plan with --precision bf16 (fp32 where "
                    "the devices have none), or lower the learning rate"
                )
            self.factor, self.good_steps = self.factor / 2, 0
            return False
        self.good_steps += 1
        if self.good_steps == self.window:
            self.factor, self.good_steps = self.factor * 2, 0
        return True
