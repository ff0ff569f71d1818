"""Counts what this rank gives to torch.distributed: how often and how many bytes, by kind.

Python's calls all go through the methods of `ProcessGroup`, which are wrapped while counting: some
10 us a call, nothing for kernels. DistributedDataParallel reduces its buckets from C++;
where a plan has it, these calls are seen at torch's dispatcher instead, which costs some 30 us
each, against milliseconds that a bucket takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from claw_plan.executor.communication.reducer import Replicas
from claw_plan.executor.mesh import NEAR, REPLICATED, SHARDED
from claw_plan.executor.torch_private import watch_dispatched
from claw_plan.planner.lower_end import TIED, WORLD
from claw_plan.planner.traffic import Kind, Moved, group_of

if TYPE_CHECKING:
    from claw_plan.executor.parallel_model import ParallelModel

Arguments = Sequence[Any]

METHODS: dict[str, tuple[str, int]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "allgather": ("all_gather", 0),
    "_allgather_base": ("all_gather", 0),
    "all_gather_single": ("all_gather", 0),
    "allgather_coalesced": ("all_gather", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "broadcast": ("broadcast", 0),
    "send": ("send", 0),
    "recv": ("recv", 0),
}
"""Method of ProcessGroup -> (operation, which argument is the full buffer). torch 2.13 renamed the
`_base` ones; what a release does not have is left out."""

REDUCER = {"allreduce_": "all_reduce", "broadcast_": "broadcast"}
"""What DistributedDataParallel's reducer calls, by the dispatcher's names."""


class TrafficCounter:
    """Counts of one rank. `axis_of_group` names the mesh axis of each group by its name."""

    def __init__(self, axis_of_group: Mapping[str, str]) -> None:
        self._axis_of_group = dict(axis_of_group)
        self._inside = False
        self._counts: dict[Kind, list[int]] = {}
        self._kinds: dict[tuple[str, str], list[int]] = {}

    def seen(self) -> dict[Kind, Moved]:
        """What was counted since it was last taken."""
        return {kind: Moved(*amounts) for kind, amounts in self._counts.items()}

    def take(self) -> dict[Kind, Moved]:
        """What was counted since it was last asked."""
        taken = self.seen()
        self._counts, self._kinds = {}, {}
        return taken

    def _add(self, op: str, group: dist.ProcessGroup, buffers: Any) -> None:
        key = (op, str(group.group_name))
        amounts = self._kinds.get(key)
        if amounts is None:
            axis = self._axis_of_group.get(key[1], TIED)
            kind = Kind(op, axis, group.size())
            # A group of one moves nothing, and a plan does not speak of it.
            held = [0, 0] if group.size() == 1 else self._counts.setdefault(kind, [0, 0])
            amounts = self._kinds[key] = held
        amounts[0] += 1
        amounts[1] += _num_bytes(buffers)

    @contextmanager
    def counting(self, *, sees_reducer: bool) -> Iterator[None]:
        """Counts every call of this process; `sees_reducer` those from C++ as well."""
        with ExitStack() as stack:
            if sees_reducer:
                stack.enter_context(watch_dispatched(REDUCER, self._dispatched))
            for name, (op, buffer) in METHODS.items():
                if name in vars(dist.ProcessGroup):
                    stack.callback(setattr, dist.ProcessGroup, name, self._wrap(name, op, buffer))
            yield

    def _wrap(self, name: str, op: str, buffer: int) -> Callable[..., Any]:
        """Puts the counting method in place and answers with the one that was there."""
        original: Callable[..., Any] = vars(dist.ProcessGroup)[name]
        call = getattr(dist.ProcessGroup, name)

        def counted(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            self._add(op, group, args[buffer])
            self._inside = True
            try:
                return call(group, *args, **kwargs)
            finally:
                self._inside = False

        setattr(dist.ProcessGroup, name, counted)
        return original

    def _dispatched(self, op: str, args: Arguments) -> None:
        if not self._inside:
            self._add(op, dist.ProcessGroup.unbox(args[1]), args[0])


def _num_bytes(buffers: Any) -> int:
    if isinstance(buffers, torch.Tensor):
        return buffers.nbytes
    return sum(_num_bytes(buffer) for buffer in buffers)


def traffic_counter(compiled: ParallelModel) -> TrafficCounter:
    """A counter that knows the groups of this rank's plan."""
    mesh, world = compiled.mesh, dist.group.WORLD
    known = {
        NEAR: "dp_shard",
        SHARDED: group_of("dp_shard", compiled.knobs),
        REPLICATED: "dp_replicate",
    }
    groups = {
        str(group.group_name): known.get(axis, axis)
        for axis, group in mesh.groups(compiled.knobs.reshard_ranks).items()
    }
    if isinstance(compiled.module, Replicas):
        groups[str(compiled.module.group.group_name)] = "dp_replicate"
    if compiled.overlap is not None:
        groups[str(compiled.overlap.backward_group.group_name)] = "pp"
    if compiled.experts is not None:
        own = compiled.experts.groups().items()
        groups |= {str(group.group_name): axis for axis, group in own}
    if world is not None:
        groups[str(world.group_name)] = group_of(WORLD, compiled.knobs)
    return TrafficCounter(groups)


def counting(compiled: ParallelModel, counter: TrafficCounter) -> AbstractContextManager[None]:
    """Around the steps of the plan."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return nullcontext()
    return counter.counting(
        sees_reducer=isinstance(compiled.module, DistributedDataParallel),
    )
