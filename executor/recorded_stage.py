"""PyTorch's pipeline stage with a span around each of its computations."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.pipelining import PipelineStage


class Recorded(Protocol):
    """What opens a span, or does nothing on a step that is not recorded."""

    def __call__(
        self, kind: str, name: str, *, awaits_peer: bool = False
    ) -> AbstractContextManager[None]:
        """`awaits_peer` when the time since the last computation was spent waiting."""


class RecordedStage(PipelineStage):
    """A stage that says when it computes. `sent_bytes` is the size of what it last sent on."""

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *,
        group: dist.ProcessGroup,
        recorded: Recorded,
    ) -> None:
        super().__init__(submodule, stage_index, num_stages, device, group=group)
        self._recorded = recorded
        self.sent_bytes = 0

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """The forward of one microbatch."""
        name = f"{self.stage_index}F{fwd_chunk_id}"
        with self._recorded("forward", name, awaits_peer=not self.is_first):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if isinstance(output, tuple):
            self.sent_bytes = sum(tensor.nbytes for tensor in output)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """The backward of one microbatch."""
        name = f"{self.stage_index}B{bwd_chunk_id}"
        with self._recorded("backward", name, awaits_peer=not self.is_last):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def perform_reduce_grad(self, grad_scale_factor: int) -> Any:
        """What FSDP does once all microbatches are through."""
        with self._recorded("other", "reduce gradients"):
            return super().perform_reduce_grad(grad_scale_factor)
