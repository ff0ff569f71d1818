"""Gradients of fully_shard's groups become the means of this rank's shards, as codes on the wire.

fully_shard lets a module's reduce-scatter be another (`set_custom_reduce_scatter`); what it gives
it is one equal part for each rank, one after the other, in fp32 whatever the kernels compute in.
Each rank encodes the others' parts, keeps what that leaves out, and adds up in fp32 what it got:
the first phase of the two-phase mean alone, for nothing has to be gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from claw_plan.executor.communication.compressed import (
    TwoPhaseFeedback,
    compressed_reduce_scatter,
)
from claw_plan.executor.communication.group_mean import GroupMean
from claw_plan.executor.communication.hooks import GradientMean


class ShardMean(GroupMean):
    """Means of which each rank of the group gets its equal part."""

    def _mean(self, flat: torch.Tensor, feedback: TwoPhaseFeedback | None) -> torch.Tensor:
        sizes = [flat.numel() // self.group.size()] * self.group.size()
        return compressed_reduce_scatter(
            flat, self.codec, feedback, self.group, self.algorithm, sizes
        )


class CodedReduceScatter:
    """What fully_shard calls for one group of parameters in place of its own reduce-scatter."""

    def __init__(self, index: int, mean: GradientMean) -> None:
        self._index, self._mean = index, mean

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Room for what comes and goes."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Writes this rank's part of the mean; by then it is there, or is on its stream."""
        assert op == dist.ReduceOp.AVG, "fully_shard asks for means of what is reduced in fp32"
        output_tensor.copy_(self._mean(self._index, input_tensor))


def reduce_by(mean: GradientMean, stages: Iterable[nn.Module]) -> None:
    """Lets all groups of sharded stages reduce so, numbered in the order of their modules."""
    modules = [module for stage in stages for module in stage.modules()]
    sharded = [module for module in modules if isinstance(module, FSDPModule)]
    for index, module in enumerate(sharded):
        module.set_custom_reduce_scatter(CodedReduceScatter(index, mean))  # type: ignore[arg-type]
