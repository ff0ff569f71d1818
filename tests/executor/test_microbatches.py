from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import compile_plan
from claw_plan.executor.ranks import Rank
from claw_plan.executor.whole_model import DOUBLE

CPU = torch.device("cpu")


def test_microbatches_accumulate_to_the_mean_of_the_batch(
    tiny_plan: Callable[..., Path], alone: Rank
) -> None:
    gradients = []
    for size in (2, 8):
        plan, loaded = open_plan(tiny_plan(f"size-{size}", microbatch_size=size))
        model = compile_plan(plan, loaded, CPU, precision=DOUBLE)
        model.forward_backward(loaded.example_batch(8))
        gradients.append([p.grad.clone() for p in model.trainable() if p.grad is not None])
    for few, whole in zip(*gradients, strict=True):
        torch.testing.assert_close(few, whole, rtol=0, atol=1e-14)
