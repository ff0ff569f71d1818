"""Which ranks of a plan share a host, as the plan has it and as they were started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.ranks import Rank
from claw_plan.planner.plan import Plan


def nodes_of(plan: Plan) -> list[int]:
    """The node of rank 0, 1, … in the plan's cluster."""
    return [int(device.partition(":")[0]) for device in plan.mesh.devices]


def ranks_per_node(plan: Plan) -> list[int]:
    """How many ranks each host runs, in the order of ranks.

    Raises ExecutionError for a plan that hands a node's devices to ranks that do not follow each
    other: starters count their ranks host by host.
    """
    nodes = nodes_of(plan)
    order = list(dict.fromkeys(nodes))
    counts = Counter(nodes)
    if nodes != [node for node in order for _ in range(counts[node])]:
        raise ExecutionError(
            "mesh.devices names the devices of one node in several places, but starters number "
            "ranks host by host; list each node's devices together, or plan again"
        )
    return [counts[node] for node in order]


def check_count(plan: Plan, rank: Rank) -> None:
    """There is one rank for each device of the plan; else ExecutionError, before any waiting."""
    wanted = plan.knobs().num_devices
    if rank.world_size != wanted:
        raise ExecutionError(
            f"the plan trains on {wanted} ranks, but {rank.world_size} were started; start "
            f"{wanted} (--print-command says how), or plan again for {rank.world_size} devices"
        )


def displaced(plan: Plan, hosts: Sequence[str]) -> str:
    """How the ranks' hosts differ from the plan's, in a sentence; empty when they do not.

    `hosts` names the host of rank 0, 1, …
    """
    nodes = nodes_of(plan)
    by_node: dict[int, int] = {}
    for rank, node in enumerate(nodes):
        first = by_node.setdefault(node, rank)
        if hosts[first] != hosts[rank]:
            return (
                f"the plan has ranks {first} and {rank} on one host, but they are on "
                f"{hosts[first]} and {hosts[rank]}: its predictions do not hold"
            )
    firsts = list(by_node.values())
    for place, first in enumerate(firsts):
        for other in firsts[:place]:
            if hosts[first] == hosts[other]:
                return (
                    f"the plan has ranks {other} and {first} on different hosts, but both are on "
                    f"{hosts[first]}: its predictions do not hold"
                )
    return ""
