"""Physics of one collective: `CollectiveWork` on a `Node`'s links to a `CollectiveCost`.

Which library runs it decides: `nccl_cost` (NCCL, and RCCL for AMD's devices) or `gloo_cost`. Both
see the hardware as a `Route`: which links the group uses, and what part of them.
"""

from __future__ import annotations

from claw_plan.profiles.cluster import Network, Node
from claw_plan.profiles.collective_constants import Library, library
from claw_plan.profiles.collective_route import route
from claw_plan.profiles.cost import ANALYTIC, CollectiveCost
from claw_plan.profiles.gloo_cost import gloo_collective
from claw_plan.profiles.nccl_cost import nccl_collective
from claw_plan.profiles.work import CollectiveWork


def analytic_collective(
    node: Node, network: Network, work: CollectiveWork, constants: Library | None = None
) -> CollectiveCost:
    """The collective on nodes like `node`, alone in its group, other groups doing the same.

    `constants` are the library's; those of the device's kind where none are given.
    """
    if work.group_size == 1 or work.bytes == 0:
        return CollectiveCost(
            latency_ns=0, bytes=0, rate_cap_bytes_per_s=1.0, link="intra", source=ANALYTIC
        )
    way = route(node, network, work)
    if work.backend == "gloo":
        return gloo_collective(way, work)
    return nccl_collective(way, work, constants or library(node.device.kind))
