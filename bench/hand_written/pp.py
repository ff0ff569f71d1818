"""Pipeline: stages cut by hand, torch's Schedule1F1B."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from accumulate import Step  # isort: skip


class Part(nn.Module):
    """Some blocks, with what stands before the first and behind the last."""

    def __init__(self, model: nn.Module, index: int, count: int) -> None:
        super().__init__()
        per_stage = len(model.blocks) // count  # type: ignore[arg-type]
        own = list(model.blocks)[index * per_stage : (index + 1) * per_stage]  # type: ignore[call-overload]
        self.blocks = nn.ModuleList(own)
        self.tokens = model.tokens if index == 0 else None
        self.norm, self.head = (model.norm, model.head) if index == count - 1 else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tokens is not None:
            x = self.tokens(x)  # type: ignore[operator]
        for block in self.blocks:
            x = block(x)
        if self.head is not None:
            x = self.head(self.norm(x))  # type: ignore[operator, misc]
        return x


def make(model: nn.Module, microbatch: int) -> Step:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = Part(model, rank, ranks)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
    schedule: Schedule1F1B | None = None
    losses: list[torch.Tensor] = []

    def share_of_loss(logits: torch.Tensor, targets: torch.Tensor, count: int) -> torch.Tensor:
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        losses.append(loss.detach())
        return loss / count

    def step(batch: dict[str, torch.Tensor]) -> float:
        nonlocal schedule
        count = len(batch["ids"]) // microbatch
        if schedule is None:
            stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
            schedule = Schedule1F1B(
                stage, count, scale_grads=False, loss_fn=lambda *of: share_of_loss(*of, count)
            )
        inputs = (batch["ids"],) if rank == 0 else ()
        target = batch["targets"] if rank == ranks - 1 else None
        schedule.step(*inputs, target=target, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        own, losses[:] = losses[-count:], []  # once more on the first step, to learn shapes
        total = (
            torch.stack(own).double().sum() / count if own else torch.zeros(1, dtype=torch.float64)
        )
        total = total.reshape(1)
        dist.all_reduce(total)
        return total.item()

    return step
