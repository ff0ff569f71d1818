"""One microbatch after the other without a pipeline; their gradients add up to the mean loss's.

Which collectives a microbatch causes is said here: replicas meet after the last one only, shards
after each, for only shards accumulate.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from claw_plan.executor.mesh import Mesh
from claw_plan.executor.pipeline import Recorded
from claw_plan.planner.model_source import Batch
from claw_plan.profiles.units import MIB

ShareOfLoss = Callable[[torch.Tensor, int], torch.Tensor]
"""(loss, number of microbatches) to what the microbatch's backward starts from."""


def replicate(module: nn.Module, mesh: Mesh, bucket_bytes: int) -> nn.Module:
    """The module whose replicas' gradients meet during backward, in buckets."""
    return DistributedDataParallel(
        module,
        process_group=mesh.group("dp_replicate"),
        bucket_cap_mb=bucket_bytes / MIB,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
    )


def run_microbatches(
    module: nn.Module, recorded: Recorded, share_of_loss: ShareOfLoss, microbatches: list[Batch]
) -> torch.Tensor:
    """Forward and backward of each; their mean loss."""
    losses: list[torch.Tensor] = []
    for index, batch in enumerate(microbatches):
        is_last = index == len(microbatches) - 1
        if isinstance(module, FSDPModule):
            module.set_requires_all_reduce(is_last)
        with _without_sync(module, is_last):
            with recorded("forward", f"0F{index}"):
                loss = module(**batch)
            with recorded("backward", f"0B{index}"):
                share_of_loss(loss, len(microbatches)).backward()
        losses.append(loss.detach().double())
    return torch.stack(losses).sum() / len(microbatches)


def _without_sync(module: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    if is_last or not isinstance(module, DistributedDataParallel):
        return nullcontext()
    return module.no_sync()
