"""What optimizers share that let ranks meet in compressed form: who averages what, and the errors.

Such an optimizer decides each step what travels. While it warms up, whole gradients do, as without
it; afterwards each rank steps from its own gradients, and what the optimizer makes of them
travels. Under DistributedDataParallel `attach` says so to its buckets; without it the optimizer
averages whole gradients itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from claw_plan.executor.communication.algorithms import NATIVE
from claw_plan.executor.communication.group_mean import GroupMean
from claw_plan.executor.communication.hooks import attach
from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.optimizers.buckets import BUCKET_BYTES, Bucket, buckets_of
from claw_plan.kernels.codec import codec_of
from claw_plan.profiles.collective_schedules import Nodes

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


class CompressedOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer whose ranks exchange compressed vectors over `group`, the replicas.

    `warmup_steps` steps go before. State that only this rank has is in `rank_state`; all other
    state is equal on all ranks.
    """

    def __init__(
        self,
        params: Parameters,
        defaults: dict[str, Any],
        *,
        codec: str,
        warmup_steps: int,
        group: dist.ProcessGroup | None,
        algorithm: str = NATIVE,
        nodes: Nodes | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        if warmup_steps < 1:
            raise ExecutionError(
                f"warmup_steps is at least 1, but got {warmup_steps}: the second moments that are "
                "kept afterwards come from these steps"
            )
        super().__init__(params, defaults)
        self.warmup_steps = warmup_steps
        self.means = GroupMean(
            group or _world(), codec_of(codec), algorithm=algorithm, nodes=nodes
        )
        self.buckets = [
            buckets_of(group["params"], bucket_bytes, f"group{index}")
            for index, group in enumerate(self.param_groups)
        ]
        for parameter in self._parameters():
            _refuse_sharded(parameter)
        _refuse_other_parameters(list(self._parameters()), self.means.group)
        self.averages_itself = self.means.group.size() > 1
        self._alike: frozenset[int] = frozenset()
        self._alike_over: dist.ProcessGroup | None = None
        self._steps_done: int | None = None

    def attach(self, model: DistributedDataParallel) -> None:
        """Takes over what the replicas' gradients do in backward; call it once, before step 1."""
        attach(model, self.mean_of_bucket)
        self.averages_itself = False

    def keep_alike(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
        """These are the same on all ranks of a group, which encode them beside others of theirs.

        What is decoded of them becomes its mean over that group, and errors add up in the mean.
        """
        self._alike = frozenset(id(parameter) for parameter in parameters)
        self._alike_over = group

    def make_alike(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Evens what was decoded of a bucket, where other ranks hold some of it alike."""
        parts = [
            part
            for parameter, part in zip(bucket.parameters, bucket.split(flat), strict=True)
            if id(parameter) in self._alike
        ]
        if parts:
            joined = torch.cat([part.reshape(-1) for part in parts])
            dist.all_reduce(joined, dist.ReduceOp.AVG, self._alike_over)
            evened = joined.split([part.numel() for part in parts])
            for part, mean in zip(parts, evened, strict=True):
                part.copy_(mean.view_as(part))

    @property
    def steps_done(self) -> int:
        """Steps taken so far, those before a checkpoint that was loaded counted."""
        if self._steps_done is None:
            counts = [state["step"] for state in self.state.values() if "step" in state]
            self._steps_done = max((int(count) for count in counts), default=0)
        return self._steps_done

    @property
    def meets_gradients(self) -> bool:
        """Whether the coming step needs the gradients' mean over the replicas."""
        return self.steps_done < self.warmup_steps

    def mean_of_bucket(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        """What a bucket of gradients becomes in backward: their mean, or what it was."""
        return self.means.whole(flat) if self.meets_gradients else flat

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step from the gradients of this rank; all ranks of the group call it together."""
        loss = loss_of(closure)
        if self.meets_gradients and self.averages_itself:
            self._average_gradients()
        for group, buckets in zip(self.param_groups, self.buckets, strict=True):
            self._step_group(group, buckets)
        self._steps_done = self.steps_done + 1
        return loss

    def _average_gradients(self) -> None:
        """What backward does where the optimizer is attached."""
        for bucket in (bucket for buckets in self.buckets for bucket in buckets):
            own = gradients(bucket)
            mean = bucket.split(self.means.whole(bucket.flat(own)))
            for parameter, gradient, part in zip(bucket.parameters, own, mean, strict=True):
                parameter.grad = gradient.copy_(part)

    @abstractmethod
    def _step_group(self, group: dict[str, Any], buckets: Sequence[Bucket]) -> None:
        """Applies one step to the parameters of a group, bucket by bucket."""

    def _parameters(self) -> Iterable[nn.Parameter]:
        return (
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        )

    def rank_state(self) -> dict[str, torch.Tensor]:
        """What this rank alone has, by name."""
        return self.means.state_dict()

    def load_rank_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes up the `rank_state` of the same rank of as many, once `state` is loaded.

        Nothing at all stands for errors that another number of ranks left behind: they are zero.
        """
        self.means.load_state_dict(state)
        self.forget_derived()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """That of torch; errors are `load_rank_state`'s."""
        super().load_state_dict(state_dict)
        self.forget_derived()

    def forget_derived(self) -> None:
        """Drops what is worked out from `state`, which has changed."""
        self._steps_done = None


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """What torch lets a step begin with: the loss, its gradients made, where a closure has it."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def gradients(bucket: Bucket) -> list[torch.Tensor]:
    """This rank's gradients; zeros where its loss did not reach a parameter."""
    return [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for parameter in bucket.parameters
    ]


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise ExecutionError(
            "compression needs a process group: call torch.distributed.init_process_group first"
        )
    return group


def _refuse_sharded(parameter: nn.Parameter) -> None:
    if isinstance(parameter, DTensor):
        raise ExecutionError(
            "compressed optimizers need whole parameters on every rank, but one of shape "
            f"{list(parameter.shape)} is a DTensor (fully_shard or tensor parallelism): sharded "
            "gradients are summed before an optimizer sees them; use compress=False"
        )


def _refuse_other_parameters(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    own = [tuple(parameter.shape) for parameter in parameters]
    everywhere = [own] * group.size()
    dist.all_gather_object(everywhere, own, group=group)
    other = next((rank for rank, shapes in enumerate(everywhere) if shapes != own), None)
    if other is not None:
        raise ExecutionError(
            f"compressed optimizers need the same parameters on every rank, but rank {other} of "
            "the group has others than this one (as ZeroRedundancyOptimizer hands them out); "
            "use compress=False there"
        )
