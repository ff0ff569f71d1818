"""This rank's parameters put together again, to be compared with one process."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from claw_plan.executor.parallel_model import ParallelModel


def whole_parameters(compiled: ParallelModel) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in the model, whole value) of every parameter this rank's stage holds.

    All ranks of the stage must iterate together: shards are gathered on the way.
    """
    for name, parameter in compiled.parameters.items():
        value = parameter.detach()
        if isinstance(value, DTensor):
            value = value.full_tensor()
        divided = compiled.tensor_parallel
        if divided is not None and name in divided.sharded:
            value = divided.full_parameter(name, gather_over(value, compiled.mesh.group("tp")))
        yield name, value


def gather_over(value: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The value of every rank of the group, in rank order."""
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, value.contiguous(), group=group)
    return parts
