"""This rank's stages under PyTorch's pipeline runtime, and the time their messages take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from claw_plan.executor.ranks import Rank
from claw_plan.executor.split_backward import Gradients, LateWeights, split_backward
from claw_plan.executor.torch_private import pipeline_runtime
from claw_plan.planner.model_source import Batch
from claw_plan.planner.plan import PlanSchedule
from claw_plan.planner.schedules import rank_of_stage, schedule_actions
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
    """A stage that says when it computes, and cures what torch's does wrong without a word.

    `sent_bytes` is the size of what it last sent on. Without `splits` a backward that the
    schedule splits runs whole in its first part: what is recomputed for the inputs' gradients
    would have to be recomputed again for those of the weights.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        recorded: Recorded,
        *,
        splits: bool = True,
    ) -> None:
        super().__init__(submodule, stage_index, num_stages, device, group=group)
        self._recorded = recorded
        self._splits = splits
        self._buffers_before: list[torch.Tensor] = []
        self.sent_bytes = 0

    def remember_buffers(self) -> None:
        """Torch runs each stage once to learn shapes; running statistics must not count it.

        The next forward begins with the buffers as they are now.
        """
        self._buffers_before = [buffer.clone() for buffer in self.submod.buffers()]

    def _restore_buffers(self) -> None:
        if not self._buffers_before:
            return
        with torch.no_grad():
            for buffer, value in zip(self.submod.buffers(), self._buffers_before, strict=False):
                buffer.copy_(value)
        self._buffers_before = []

    def _comes_from_peer(self, step: int) -> bool:
        """Whether the neighbour that is `step` stages away is on another rank."""
        home = self.stage_index_to_group_rank.get(self.stage_index + step)
        return home is not None and home != self.group_rank

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The messages that bring the gradients of what this stage sent."""
        _make_contiguous(self.grad_recv_info.get(bwd_chunk_id, ()))
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """The forward of one microbatch."""
        self._restore_buffers()
        name = f"{self.stage_index}F{fwd_chunk_id}"
        with self._recorded("forward", name, awaits_peer=self._comes_from_peer(-1)):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if isinstance(output, tuple):
            self.sent_bytes = sum(tensor.nbytes for tensor in output)
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> Any:
        """The backward of one microbatch, or the inputs' part of it."""
        name = f"{self.stage_index}{'B' if full_backward else 'I'}{bwd_chunk_id}"
        with self._recorded("backward", name, awaits_peer=self._comes_from_peer(1)):
            return super().backward_one_chunk(
                bwd_chunk_id,
                loss=loss,
                full_backward=full_backward,
                last_backward=last_backward,
            )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The weights' part of a backward."""
        with self._recorded("backward", f"{self.stage_index}W{bwd_chunk_id}"):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[Gradients, Any]:
        """Torch's whole backward, our own parts of one: see `split_backward`."""
        if backward_type == "weight":
            late = bwd_kwargs["param_groups"]
            if isinstance(late, LateWeights):
                self._gather()
                late.run()
            return (), None
        if backward_type == "full" or not self._splits:
            if bwd_kwargs["output_grads"] is None:
                # A loss in a tuple, as it comes here from I, is silently left out by torch.
                [loss] = _leaves_of(bwd_kwargs["stage_output"])
                bwd_kwargs = bwd_kwargs | {"stage_output": loss}
            gradients, late = super().backward_maybe_with_nosync("full", bwd_kwargs, last_backward)
            return _as_sent(gradients), late
        self._gather()
        gradients, late = split_backward(
            _leaves_of(bwd_kwargs["stage_output"]),
            bwd_kwargs["output_grads"],
            bwd_kwargs["input_values"],
        )
        return _as_sent(gradients), late

    def _gather(self) -> None:
        """Whole parameters for a part of a backward, whose sums wait for the step's end."""
        if not isinstance(self.submod, FSDPModule):
            return
        self.submod.set_is_last_backward(False)
        self.submod.set_reshard_after_backward(False)
        self.submod.set_requires_gradient_sync(False)
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                module.unshard()

    def perform_reduce_grad(self, grad_scale_factor: int) -> Any:
        """What FSDP does once all microbatches are through."""
        with self._recorded("other", "reduce gradients"):
            return super().perform_reduce_grad(grad_scale_factor)


def _as_sent(gradients: Gradients) -> Gradients:
    """Contiguous, as messages must be; behind a permuted input they are not."""
    return tuple(None if gradient is None else gradient.contiguous() for gradient in gradients)


def _make_contiguous(received: Sequence[Any]) -> None:
    """Torch makes its buffers with the strides of gradients that it saw before they were sent."""
    for each in received:
        if each.buffer is not None:
            each.buffer = each.buffer.contiguous()


def _leaves_of(output: torch.Tensor | tuple[torch.Tensor, ...]) -> Sequence[torch.Tensor]:
    return (output,) if isinstance(output, torch.Tensor) else output


def make_pipeline(
    stages: Sequence[RecordedStage],
    schedule: PlanSchedule,
    device: torch.device,
    share_of_loss: Callable[[torch.Tensor, int], torch.Tensor],
) -> Callable[[list[Batch]], torch.Tensor]:
    """Forward and backward of all microbatches by the plan's actions, and their mean loss.

    `share_of_loss` makes of a microbatch's loss what its backward starts from. The loss is 0 on
    ranks other than that of the last stage.
    """
    count, num_ranks = schedule.num_microbatches, stages[0].group_size
    rows = schedule_actions(schedule.name, num_ranks, count, schedule.stages_per_rank)
    losses: list[torch.Tensor] = []
    nothing = torch.zeros((), dtype=torch.double, device=device)

    def part_of_mean(loss: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses.append(loss.detach())
        return share_of_loss(loss, count)

    runtime = pipeline_runtime(
        stages, [[str(action) for action in row] for row in rows], count, part_of_mean
    )
    for stage in stages:
        stage.remember_buffers()

    def run(microbatches: list[Batch]) -> torch.Tensor:
        runtime.run(microbatches)
        # Before its first step the runtime calls the loss once more, to learn shapes.
        own = losses[-count:]
        losses.clear()
        return torch.stack(own).double().sum() / count if own else nothing

    return run


def time_sends(
    stages: Sequence[RecordedStage], schedule: str, group: dist.ProcessGroup, place: Rank
) -> dict[CollectiveWork, list[int]]:
    """How long each message between neighbouring stages takes, on the rank that sends it.

    In a step a message is hidden in the wait for the other side's computation; here one of the
    same size goes to a rank that waits for it, a few times. Of the ranks on a host one sends at a
    time: those that share a NIC would take turns by chance.
    """
    samples: dict[CollectiveWork, list[int]] = {}
    own = {stage.stage_index: stage for stage in stages}
    rank, num_ranks, device = dist.get_rank(group), dist.get_world_size(group), stages[0].device
    for sender in range(stages[0].num_stages - 1):
        source = rank_of_stage(schedule, sender, num_ranks)
        target = rank_of_stage(schedule, sender + 1, num_ranks)
        if source == target:
            continue
        sent_bytes = own[sender].sent_bytes if sender in own else 0
        size = torch.tensor([sent_bytes], device=device)
        dist.broadcast(size, src=dist.get_global_rank(group, source), group=group)
        buffer = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
        ends = [dist.get_global_rank(group, end) for end in (source, target)]
        for turn in range(place.local_world_size):
            dist.barrier(dist.group.WORLD)
            if rank in (source, target) and ends[0] % place.local_world_size == turn:
                times = [_one_way_ns(buffer, ends, group) for _ in range(1 + REPEATS)]
                if rank == source:  # the first trip only opens the way
                    work = _send_work(buffer, place.hosts(ends))
                    samples.setdefault(work, []).extend(times[1:])
    return samples


def _one_way_ns(buffer: torch.Tensor, ends: Sequence[int], group: dist.ProcessGroup) -> int:
    """How long the message takes from the first end to the second.

    The time until a word is back, less what the word takes, which is half of its own round trip.
    """
    word = buffer[:1].clone()
    to_here_ns = _until_answered_ns(word, word, ends, group) // 2
    return max(1, _until_answered_ns(buffer, word, ends, group) - to_here_ns)


def _until_answered_ns(
    message: torch.Tensor, word: torch.Tensor, ends: Sequence[int], group: dist.ProcessGroup
) -> int:
    source, target = ends
    start = time.perf_counter_ns()
    if dist.get_rank() == source:
        dist.send(message, target, group=group)
        dist.recv(word, target, group=group)
    else:
        dist.recv(message, source, group=group)
        dist.send(word, source, group=group)
    if message.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter_ns() - start


def _send_work(buffer: torch.Tensor, hosts: int) -> CollectiveWork:
    """Its key; GPUs are taken to have NICs of their own, whatever others do."""
    return CollectiveWork(
        op="send",
        bytes=buffer.nbytes,
        group_size=2,
        nodes=hosts,
        backend="nccl" if buffer.is_cuda else "gloo",
        concurrent=1 if hosts > 1 and not buffer.is_cuda else 0,
    )
