"""Shards of divided weights: parallelize_module over two ranks, fully_shard over the others."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from accumulate import Step, accumulating  # isort: skip
from tp import divide  # isort: skip


def make(model: nn.Module, microbatch: int) -> Step:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    divide(model, mesh["tp"])
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    return accumulating(model, optimizer, microbatch, ranks)
