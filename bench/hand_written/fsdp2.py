"""Shards: torch's fully_shard, a group of parameters for each block."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from accumulate import Step, accumulating  # isort: skip


def make(model: nn.Module, microbatch: int) -> Step:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return accumulating(model, optimizer, microbatch, ranks)
