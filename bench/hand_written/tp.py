"""Tensor parallelism: torch's parallelize_module on the linears of each block."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from accumulate import Step, accumulating  # isort: skip


def divide(model: nn.Module, mesh: DeviceMesh) -> None:
    columns = ("attention.q", "attention.k", "attention.v", "up")
    styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    # The input enters once, so that q, k and v share one sum in backward.
    styles["attention"] = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Replicate()
    )
    styles |= {name: RowwiseParallel() for name in ("attention.out", "down")}
    for block in model.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh, styles)


def make(model: nn.Module, microbatch: int) -> Step:
    ranks = dist.get_world_size()
    divide(model, init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    return accumulating(model, optimizer, microbatch, ranks)
