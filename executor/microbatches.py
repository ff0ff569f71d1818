"""One microbatch after the other without a pipeline; their gradients add up to the mean loss's.

Which collectives a microbatch causes is said here. Replicas meet after the last one only. Shards
meet as the plan's `zero` says: with 3 parameters are gathered for each pass and gradients
scattered after each backward; with 2 parameters are gathered once a step; with 1 gradients add up
whole and are scattered once a step, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from claw_plan.executor.communication.hooks import Mean
from claw_plan.executor.communication.reducer import Replicas
from claw_plan.executor.mesh import Mesh
from claw_plan.executor.pipeline import Recorded
from claw_plan.executor.torch_private import leave_to_others
from claw_plan.planner.bucket_plan import filled_buckets
from claw_plan.planner.model_source import Batch
from claw_plan.profiles.units import MIB

ShareOfLoss = Callable[[torch.Tensor, int], torch.Tensor]
"""(loss, number of microbatches) to what the microbatch's backward starts from."""


def replicate(
    module: nn.Module,
    mesh: Mesh,
    bucket_bytes: int,
    *,
    buckets: Sequence[int] = (),
    order: Sequence[int] = (),
    mean: Mean | None = None,
    finds_unreached: bool,
    left_out: Collection[nn.Parameter] = (),
) -> nn.Module:
    """The module whose replicas' gradients meet during backward, in buckets.

    `buckets` are numbers of parameters where the plan says which share one, `order` says how
    these leave where the next forward waits for them one by one, `mean` what becomes of a bucket
    where it is not the library's own all-reduce. With `finds_unreached` it looks in each
    backward which parameters get no gradient. Gradients of those `left_out` do not meet here.
    """
    if mean is not None and not buckets:
        trained = [p for p in module.parameters() if p.requires_grad][::-1]
        buckets = filled_buckets((p.numel() * p.element_size() for p in trained), bucket_bytes)
    if buckets:
        group = mesh.group("dp_replicate")
        if order:  # a group of their own, so that nothing of the next step queues behind them
            group = dist.new_group(dist.get_process_group_ranks(group))
        return Replicas(module, group, buckets, may_miss=finds_unreached, mean=mean, order=order)
    if left_out:
        apart = {id(parameter) for parameter in left_out}
        leave_to_others(module, [n for n, p in module.named_parameters() if id(p) in apart])
    return DistributedDataParallel(
        module,
        process_group=mesh.group("dp_replicate"),
        bucket_cap_mb=bucket_bytes / MIB,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
        find_unused_parameters=finds_unreached,
    )


def run_microbatches(
    module: nn.Module,
    zero: int,
    recorded: Recorded,
    share_of_loss: ShareOfLoss,
    microbatches: list[Batch],
) -> torch.Tensor:
    """Forward and backward of each; their mean loss."""
    losses: list[torch.Tensor] = []
    for index, batch in enumerate(microbatches):
        is_last = index == len(microbatches) - 1
        if isinstance(module, FSDPModule):
            _say_to_shards(module, zero, is_last=is_last)
        with _without_sync(module, is_last):
            with recorded("forward", f"0F{index}"):
                loss = module(**batch)
            with recorded("backward", f"0B{index}"):
                share_of_loss(loss, len(microbatches)).backward()
        losses.append(loss.detach().double())
    return torch.stack(losses).sum() / len(microbatches)


def _say_to_shards(module: FSDPModule, zero: int, *, is_last: bool) -> None:
    """What the coming backward does with gathered parameters and whole gradients."""
    # After its last backward FSDP gives its buffers back; with gradients scattered it may always.
    module.set_is_last_backward(is_last or zero > 1)
    module.set_reshard_after_backward(is_last or zero == 3)
    module.set_requires_gradient_sync(is_last or zero > 1)
    module.set_requires_all_reduce(is_last)


def _without_sync(module: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    if is_last or not isinstance(module, DistributedDataParallel | Replicas):
        return nullcontext()
    return module.no_sync()
