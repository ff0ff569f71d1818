"""Recompute: blocks that keep less for the backward pass and run again what they did not keep."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from claw_plan.executor.double_mode import DoubleMode
from claw_plan.executor.whole_model import AS_PLANNED, DOUBLE


def recompute(block: nn.Module, precision: str = AS_PLANNED) -> None:
    """Keeps only the block's inputs; in place, so that its parameters keep their names.

    The engine that runs it again in backward knows nothing of a DoubleMode around the step.
    """
    again = DoubleMode if precision == DOUBLE else nullcontext
    block.forward = partial(
        checkpoint,
        block.forward,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), again()),
    )
