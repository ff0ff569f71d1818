"""What ranks of all stages on one CPU host share: the cores they compute on and the way out.

A stage is one flow at the pace of its slowest rank: it names a host's link once for each rank it
has there, so that the link divides its capacity among ranks, whatever stages they are of. Hosts
that may share a machine's cores say so in the cluster file. Hosts with the same ranks of the same
stages see the same load at the same time, so one of them stands for all.

GPUs share neither: each has its own NICs (`collective_route`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.placement import stage_hosts
from claw_plan.planner.problem import Problem
from claw_plan.profiles.cluster import Node
from claw_plan.profiles.units import NS_PER_S
from claw_plan.simulator.task_graph import TaskGraphBuilder

Placed = tuple[Problem, Candidate, int]
"""A stage's problem and candidate, and its place among the pipeline ranks (`View`)."""


@dataclass(slots=True)
class _Shared:
    """One thing that ranks share: its capacity, and how many ranks of each stage use it."""

    name: str
    per_s: float
    ranks: dict[int, int]
    cores: int = 0


def host_links(
    builder: TaskGraphBuilder, views: Sequence[Placed]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Of each stage its links of (cores, network); cores are none where all ranks have their own.

    Each link stands there as often as the stage has ranks on it.
    """
    cores: dict[Hashable, _Shared] = {}
    ways_out: dict[Hashable, _Shared] = {}
    for stage, (problem, candidate, place) in enumerate(views):
        nodes = problem.cluster.nodes
        for host, ranks in stage_hosts(candidate, place, problem.devices_per_node):
            node, key = nodes[host], (id(problem.cluster), host)
            machine = (node.machine,) if node.machine else key
            of_machine = cores.setdefault(machine, _cores_of(node, host))
            of_machine.ranks[stage] = of_machine.ranks.get(stage, 0) + ranks
            ways_out.setdefault(key, _way_out_of(node, host)).ranks[stage] = ranks
    crowded = {
        key: each for key, each in cores.items() if 0 < each.cores < sum(each.ranks.values())
    }
    of_cores, of_network = (_links(builder, some, len(views)) for some in (crowded, ways_out))
    return list(zip(of_cores, of_network, strict=True))


def _cores_of(node: Node, host: int) -> _Shared:
    name = node.machine or f"host {host}"
    return _Shared(f"{name} cores", float(node.cores * NS_PER_S), {}, node.cores)


def _way_out_of(node: Node, host: int) -> _Shared:
    return _Shared(f"host {host} network", node.nic.bytes_per_s * node.nic_count, {})


def _links(
    builder: TaskGraphBuilder, all_shared: Mapping[Hashable, _Shared], stages: int
) -> list[tuple[int, ...]]:
    """A link for each load that differs from the others', and of each stage those it uses."""
    made: set[Hashable] = set()
    links: list[tuple[int, ...]] = [()] * stages
    for each in all_shared.values():
        load = (each.per_s, *sorted(each.ranks.items()))
        if load in made:
            continue
        made.add(load)
        link = builder.link(each.name, each.per_s)
        for stage, ranks in each.ranks.items():
            links[stage] += (link,) * ranks
    return links
