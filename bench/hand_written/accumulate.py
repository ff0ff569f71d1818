"""What scripts without a pipeline share: microbatches, the optimizer's step, the logged loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

Step = Callable[[dict[str, torch.Tensor]], float]


def accumulating(
    model: nn.Module, optimizer: torch.optim.Optimizer, microbatch: int, copies: int
) -> Step:
    """A step over microbatches; `copies` ranks are added up for the mean loss."""
    no_sync: Callable[[], Any] = getattr(model, "no_sync", contextlib.nullcontext)

    def step(batch: dict[str, torch.Tensor]) -> float:
        parts = {name: value.split(microbatch) for name, value in batch.items()}
        count = len(next(iter(parts.values())))
        losses = []
        for index in range(count):
            is_last = index == count - 1
            with contextlib.nullcontext() if is_last else no_sync():
                loss = model(**{name: rows[index] for name, rows in parts.items()})
                (loss / count).backward()
            losses.append(loss.detach().double())
        optimizer.step()
        optimizer.zero_grad()
        total = (torch.stack(losses).sum() / count).reshape(1)
        dist.all_reduce(total)
        return total.item() / copies

    return step
