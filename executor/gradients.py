"""What gradients still need between the last backward and the optimizer's step.

Four sums, each a silent fault when it is left out (losses of step 1 are equal, then they drift):

- *data parallel*, where neither DDP nor FSDP does it: a mean over dp_replicate, in buckets;
- *sequence parallel*: norms and row biases saw one slice of the sequence; a sum over tp;
- *tied*: a parameter held by several stages; a sum over these stages;
- microbatches: their mean, by scaling each loss before its backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor


def share_of_mean(loss: torch.Tensor, num_microbatches: int) -> torch.Tensor:
    """What a microbatch's loss adds to the mean over all of them."""
    return loss / num_microbatches


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's own part of a tensor; the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's part of a gradient; a parameter that nothing reached gets zeros first."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local(parameter.grad)


def reduce_gradients(
    parameters: Sequence[nn.Parameter],
    group: dist.ProcessGroup,
    op: dist.ReduceOp.RedOpType,
    bucket_bytes: int,
) -> None:
    """All-reduces the gradients over the group, packed into buckets of about that size.

    A bucket ends with a flag for each gradient that was there at all. What no rank's backward
    reached has no gradient afterwards either, so that the optimizer leaves it alone.
    """
    unreached = {id(parameter) for parameter in parameters if parameter.grad is None}
    owners = iter(parameters)
    for bucket in buckets([local_gradient(parameter) for parameter in parameters], bucket_bytes):
        held = [next(owners) for _ in bucket]
        flags = bucket[0].new_tensor([float(id(owner) not in unreached) for owner in held])
        flat = torch.cat([*(gradient.reshape(-1) for gradient in bucket), flags])
        dist.all_reduce(flat, op=op, group=group)
        *parts, flags = torch.split(flat, [*(g.numel() for g in bucket), len(bucket)])
        for owner, gradient, part, flag in zip(held, bucket, parts, flags.tolist(), strict=True):
            gradient.copy_(part.view_as(gradient))
            if not flag:
                owner.grad = None


def buckets(gradients: Sequence[torch.Tensor], bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Runs of one dtype, in order, each closed once it holds at least `bucket_bytes`."""
    bucket: list[torch.Tensor] = []
    held_bytes = 0
    for gradient in gradients:
        if bucket and (held_bytes >= bucket_bytes or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, held_bytes = [], 0
        bucket.append(gradient)
        held_bytes += gradient.numel() * gradient.element_size()
    if bucket:
        yield bucket


@dataclass(frozen=True, slots=True)
class TiedSum:
    """A tied gradient's sum under way; `is_first` on the first rank that holds it."""

    work: dist.Work
    is_first: bool


class TiedGradients:
    """Sums gradients of parameters that several pipeline stages hold.

    `held` maps each own parameter to all its names; two stages hold the same parameter when they
    share a name of the whole model's tie. Every rank of `pp_group` must construct this.
    """

    def __init__(self, held: Mapping[str, nn.Parameter], pp_group: dist.ProcessGroup) -> None:
        size = dist.get_world_size(pp_group)
        names: list[list[str]] = [[] for _ in range(size)]
        trained = sorted(name for name, parameter in held.items() if parameter.requires_grad)
        dist.all_gather_object(names, trained, group=pp_group)
        shared = [
            (name, [stage for stage in range(size) if name in names[stage]])
            for name in sorted(set().union(*names))
        ]
        self.holders = {name: stages for name, stages in shared if len(stages) > 1}
        self._pp_group = pp_group
        self._mine = [(held[name], self.holders[name]) for name in self.holders if name in held]
        self._groups = _groups_of(self.holders.values(), pp_group)

    def is_first_holder(self, name: str) -> bool:
        """Whether no earlier rank of the pipeline holds the parameter too."""
        stages = self.holders.get(name)
        return stages is None or stages[0] == dist.get_rank(self._pp_group)

    def add_up(self) -> None:
        """Sums the gradients; every holder has the whole gradient afterwards."""
        for tied in self.begin():
            tied.work.wait()

    def begin(self) -> list[TiedSum]:
        """The same without waiting; one sum after the other, in the order of all holders."""
        me, sums = dist.get_rank(self._pp_group), list[TiedSum]()
        for parameter, stages in self._mine:
            group = self._groups[tuple(stages)]
            work = dist.all_reduce(local_gradient(parameter), group=group, async_op=True)
            assert work is not None
            sums.append(TiedSum(work=work, is_first=stages[0] == me))
        return sums


Chain = tuple[list[int], list[tuple[int, ...]]]
"""The global ranks of one pipeline, and the sets of its stages that share parameters."""


def _groups_of(
    holders: Iterable[list[int]], pp_group: dist.ProcessGroup
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """A group for each set of stages. All ranks of the world take part, in the same order."""
    own: Chain = (dist.get_process_group_ranks(pp_group), sorted(map(tuple, holders)))
    chains: list[Chain] = [own] * dist.get_world_size()
    dist.all_gather_object(chains, own)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    seen: set[tuple[int, ...]] = set()
    for ranks, wanted in chains:
        for stages in wanted:
            members = tuple(ranks[stage] for stage in stages)
            if members not in seen:
                seen.add(members)
                group = dist.new_group(list(members))
                if dist.get_rank() in members:
                    groups[stages] = group
    return groups
