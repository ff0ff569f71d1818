"""From a Problem on several kinds of devices to one Problem for each kind.

A kind is nodes that are equal, or that the user groups (`node_profile` in the cluster file), of
which the slowest counts. All that one device computes, keeps and exchanges with its like is
judged by its kind's own Problem: its rates, its memory, its links. What unlike devices do together
is judged by the whole Problem, in which the slowest counts.

Tensor-parallel ranks meet several times in every block, so the slowest would set the pace of all.
A pipeline rank lies on one kind, and with it every group of its own: however little two kinds
differ, they share none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from claw_plan.planner.mixed.alike import slowest_for_all
from claw_plan.planner.mixed.plan import MixedRank
from claw_plan.planner.problem import Problem
from claw_plan.planner.stage_streams import View
from claw_plan.profiles.cluster import Cluster, Node
from claw_plan.profiles.cost import CostModel

MakeCost = Callable[[Cluster], CostModel]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Devices that are alike: the numbers of their nodes, and the problem on these nodes alone."""

    name: str
    nodes: tuple[int, ...]
    problem: Problem
    _shares: dict[int, Problem] = field(default_factory=dict, init=False)

    @property
    def num_devices(self) -> int:
        """Devices of all its nodes."""
        return self.problem.cluster.num_devices

    def with_batch(self, batch: int) -> Problem:
        """The problem on its nodes with another number of samples a step."""
        if batch == self.problem.training.global_batch:
            return self.problem
        if batch not in self._shares:
            self._shares[batch] = self.problem.with_batch(batch)
        return self._shares[batch]

    def device_names(self) -> list[str]:
        """node:device of its devices, in order."""
        per_node = self.problem.devices_per_node
        return [f"{node}:{local}" for node in self.nodes for local in range(per_node)]


@dataclass(frozen=True, kw_only=True)
class MixedProblem:
    """A problem on several kinds; `whole` is that of all devices together."""

    whole: Problem
    kinds: tuple[Kind, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the kinds."""
        return tuple(kind.name for kind in self.kinds)

    def view(self, rank: MixedRank, batch: int) -> View:
        """What a rank of a pipeline with so many samples a step is lowered with."""
        problem = self.kinds[rank.kind].with_batch(batch)
        return View(problem, rank.candidate, rank.place)


def kinds_of(problem: Problem, make_cost: MakeCost) -> tuple[Kind, ...]:
    """The kinds of a cluster, in the order of their first nodes."""
    nodes = problem.cluster.nodes
    alike: list[list[int]] = []
    for number, node in enumerate(nodes):
        group = next((group for group in alike if _is_alike(nodes[group[0]], node)), None)
        if group is None:
            alike.append([number])
        else:
            group.append(number)
    names = _names([nodes[group[0]] for group in alike])
    return tuple(
        Kind(name=name, nodes=tuple(group), problem=_on(problem, group, make_cost))
        for name, group in zip(names, alike, strict=True)
    )


def _is_alike(one: Node, other: Node) -> bool:
    if one.profile or other.profile:
        return one.profile == other.profile
    return one is other or one == other


def _on(problem: Problem, group: list[int], make_cost: MakeCost) -> Problem:
    cluster = problem.cluster
    own = replace(cluster, nodes=tuple(cluster.nodes[number] for number in group))
    return slowest_for_all(replace(problem, cluster=own, cost=make_cost(own)))


def _names(nodes: list[Node]) -> list[str]:
    """The user's name or the node's type, with the device where types repeat, then numbered."""
    names = [node.profile or node.type for node in nodes]
    if len(set(names)) < len(names):
        names = [node.profile or f"{node.device_count} x {node.device.name}" for node in nodes]
    return [
        name if names.count(name) == 1 else f"{name} ({names[: place + 1].count(name)})"
        for place, name in enumerate(names)
    ]
