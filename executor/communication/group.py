"""Ranks, and the nodes they lie on, to a group whose collectives are ready before the first step.

    group = create_group(strategy="hierarchical", intra_node=True)
    group.all_reduce(flat)

Every way between two ranks is opened when the group is made, so that changing the strategy later
costs a lookup: no communicator is made again.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from claw_plan.executor.communication import algorithms
from claw_plan.executor.communication.compressed import TwoPhaseFeedback, compressed_mean
from claw_plan.executor.errors import ExecutionError
from claw_plan.kernels.codec import Codec
from claw_plan.profiles.collective_schedules import Nodes
from claw_plan.profiles.collective_trees import HALF_BYTES
from claw_plan.profiles.errors import near_matches


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveGroup:
    """A process group, its ranks by node in the order a ring takes them, and a strategy."""

    process_group: dist.ProcessGroup
    nodes: Nodes
    strategy: str
    half_bytes: float = HALF_BYTES
    """What the links carry while a message starts, by which a tree's chunks are cut."""

    @property
    def device(self) -> torch.device:
        """Where tensors of the backend lie."""
        return _device_of(self.process_group)

    def all_reduce(self, flat: Tensor, carry: algorithms.Exchange | None = None) -> None:
        """Replaces `flat` by the sum over the ranks; `carry` moves messages."""
        algorithms.all_reduce(
            flat, self.process_group, self.strategy, self.nodes, carry, self.half_bytes
        )

    def reduce_scatter(self, flat: Tensor) -> Tensor:
        """This rank's part of the sum."""
        return algorithms.reduce_scatter(flat, self.process_group, self.strategy, self.nodes)

    def all_gather(self, part: Tensor, numel: int) -> Tensor:
        """All ranks' parts of `numel` elements."""
        return algorithms.all_gather(part, numel, self.process_group, self.strategy, self.nodes)

    def compressed_mean(
        self, flat: Tensor, codec: Codec, feedback: TwoPhaseFeedback | None = None
    ) -> Tensor:
        """The mean over the ranks, with codes on the wire."""
        group = self.process_group
        return compressed_mean(flat, codec, feedback, group, self.strategy, self.nodes)

    def using(self, strategy: str) -> CollectiveGroup:
        """The same ranks with another strategy. Nothing is sent."""
        return replace(self, strategy=_known(strategy))

    def ordered(self, order: Sequence[int]) -> CollectiveGroup:
        """The same ranks as one node, on a ring in this order (`profiles.rank_order`)."""
        if sorted(order) != list(range(self.process_group.size())):
            raise ExecutionError(
                f"an order names the group's {self.process_group.size()} ranks once each, "
                f"but got {list(order)}"
            )
        return replace(self, nodes=(tuple(order),))


def create_group(
    strategy: str = algorithms.NATIVE,
    *,
    intra_node: bool = True,
    ranks: Sequence[int] | None = None,
    hosts: Sequence[str] | None = None,
) -> CollectiveGroup | None:
    """A group of these ranks (None: of all), on every rank of the default group at once.

    With `intra_node` ranks of one host are a node, which `hierarchical` crosses first and the
    others keep together; without it all ranks are alike. `hosts` names each rank's host (None:
    the hosts are asked). Ranks that are not in the group get None.
    """
    _known(strategy)
    world = dist.group.WORLD
    if world is None:
        raise ExecutionError("a group needs ranks that have met: call init_process_group first")
    chosen = list(range(world.size()) if ranks is None else ranks)
    made = world if ranks is None else dist.new_group(chosen)
    named = _host_names(world) if intra_node and hosts is None else list(hosts or [])
    if not isinstance(made, dist.ProcessGroup) or world.rank() not in chosen:
        return None
    nodes = algorithms.flat_nodes(made)
    if intra_node:
        if len(named) != world.size():
            raise ExecutionError(
                f"hosts names each of the {world.size()} ranks, but got {len(named)} names"
            )
        nodes = nodes_of([named[rank] for rank in chosen])
    return group_over(made, nodes, strategy)


def group_over(group: dist.ProcessGroup, nodes: Nodes, strategy: str) -> CollectiveGroup:
    """The ranks of a process group that is there, all ways between them open; all call it."""
    open_ways(group)
    return CollectiveGroup(process_group=group, nodes=nodes, strategy=_known(strategy))


def nodes_of(hosts: Sequence[str]) -> Nodes:
    """Ranks 0, 1, … by host, in the order of each host's first rank."""
    found: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return tuple(tuple(ranks) for ranks in found.values())


def _known(strategy: str) -> str:
    if strategy not in algorithms.NAMES:
        hint = near_matches(strategy, algorithms.NAMES)
        raise ExecutionError(f"there is no collective strategy {strategy!r}; {hint}")
    return strategy


def _host_names(world: dist.ProcessGroup) -> list[str]:
    names: list[str] = [""] * world.size()
    dist.all_gather_object(names, socket.gethostname(), group=world)
    return names


def open_ways(group: dist.ProcessGroup) -> None:
    """A byte between any two ranks: NCCL and gloo open their connections with the first one."""
    parts = [
        torch.zeros(1, dtype=torch.uint8, device=_device_of(group)) for _ in range(group.size())
    ]
    algorithms.all_to_all(parts, [1] * group.size(), group, range(group.size()))


def _device_of(group: dist.ProcessGroup) -> torch.device:
    if "nccl" in dist.get_backend_config(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
