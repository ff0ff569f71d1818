"""Replicas: torch's DistributedDataParallel."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from accumulate import Step, accumulating  # isort: skip


def make(model: nn.Module, microbatch: int) -> Step:
    ranks = dist.get_world_size()
    wrapped = DistributedDataParallel(
        model, bucket_cap_mb=25, broadcast_buffers=False, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return accumulating(wrapped, optimizer, microbatch, ranks)
