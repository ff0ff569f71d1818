"""This rank's stage under PyTorch's pipeline runtime, and the time its messages take."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.pipelining import PipelineStage

from claw_plan.executor.torch_private import pipeline_runtime
from claw_plan.planner.model_source import Batch
from claw_plan.planner.plan import PlanSchedule
from claw_plan.planner.schedules import schedule_actions
from claw_plan.profiles.work import CollectiveWork

REPEATS = 10
"""Messages timed of each size."""


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


def make_pipeline(
    stage: RecordedStage,
    schedule: PlanSchedule,
    device: torch.device,
    share_of_loss: Callable[[torch.Tensor, int], torch.Tensor],
) -> Callable[[list[Batch]], torch.Tensor]:
    """Forward and backward of all microbatches by the plan's actions, and their mean loss.

    `share_of_loss` makes of a microbatch's loss what its backward starts from. The loss is 0 on
    ranks other than those of the last stage.
    """
    count = schedule.num_microbatches
    rows = schedule_actions(schedule.name, stage.num_stages, count)
    losses: list[torch.Tensor] = []

    def part_of_mean(loss: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses.append(loss.detach())
        return share_of_loss(loss, count)

    runtime = pipeline_runtime(
        stage, [[str(action) for action in row] for row in rows], count, part_of_mean
    )

    def run(microbatches: list[Batch]) -> torch.Tensor:
        # The runtime hands each loss a target; ours are in the batch, so it gets a place holder.
        target = torch.empty(count) if stage.is_last else None
        whole = {
            name: torch.cat([batch[name] for batch in microbatches]) for name in microbatches[0]
        }
        runtime.step(
            **whole,  # type: ignore[arg-type]
            target=target,
            return_outputs=False,
        )
        # Before its first step the runtime calls the loss once more, to learn shapes.
        own = losses[-count:] or [torch.zeros((), device=device)]
        losses.clear()
        return torch.stack(own).double().sum() / count

    return run


def time_sends(stage: RecordedStage, group: dist.ProcessGroup) -> dict[CollectiveWork, list[int]]:
    """How long each message between neighbouring stages takes, on the rank that receives it.

    In a step a message is hidden in the wait for the other side's computation; here both sides
    meet first, and one of the same size goes over, a few times.
    """
    samples: dict[CollectiveWork, list[int]] = {}
    for sender in range(stage.num_stages - 1):
        source = dist.get_global_rank(group, sender)
        size = torch.tensor([stage.sent_bytes], device=stage.device)
        dist.broadcast(size, src=source, group=group)
        buffer = torch.empty(int(size.item()), dtype=torch.uint8, device=stage.device)
        for _ in range(REPEATS):
            dist.barrier(group)
            duration_ns = _send_once(stage, group, sender, buffer)
            if stage.stage_index == sender + 1:
                samples.setdefault(_send_work(buffer), []).append(duration_ns)
    return samples


def _send_once(
    stage: RecordedStage, group: dist.ProcessGroup, sender: int, buffer: torch.Tensor
) -> int:
    start = time.perf_counter_ns()
    if stage.stage_index == sender:
        dist.send(buffer, dist.get_global_rank(group, sender + 1), group=group)
    elif stage.stage_index == sender + 1:
        dist.recv(buffer, dist.get_global_rank(group, sender), group=group)
    if buffer.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter_ns() - start


def _send_work(buffer: torch.Tensor) -> CollectiveWork:
    return CollectiveWork(
        op="send",
        bytes=buffer.nbytes,
        group_size=2,
        nodes=1,
        backend="nccl" if buffer.is_cuda else "gloo",
    )
