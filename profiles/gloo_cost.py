"""What a collective of gloo costs: rings over TCP, whatever the links are.

Asked by `collective_cost` for groups of CPU ranks. gloo moves its own bytes: its reduce_scatter
as many as all_reduce (interface counters, torch 2.13, 2 and 4 ranks); its broadcast is a binomial
tree. What starting costs is in the link's `startup_ns`, measured per collective.
"""

from __future__ import annotations

import math

from claw_plan.profiles.collective_route import Route
from claw_plan.profiles.cost import ANALYTIC, CollectiveCost
from claw_plan.profiles.work import CollectiveWork

_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 2, "all_to_all": 1}


def gloo_collective(route: Route, work: CollectiveWork) -> CollectiveCost:
    """The collective alone on its links, other groups doing the same."""
    if work.op == "send":
        return _send(route, work)
    doublings = math.ceil(math.log2(route.ranks))
    if work.op == "broadcast":
        latency_ns = doublings * _startup_ns(route, work.op, 1)
        total = float(doublings * work.bytes)
    else:
        passes = _PASSES[work.op]
        latency_ns = (route.ranks - 1) * _startup_ns(route, work.op, passes)
        total = passes * (route.ranks - 1) * work.bytes / route.ranks
    return _flow(route, work.op, latency_ns, total)


def _flow(route: Route, op: str, latency_ns: float, total: float) -> CollectiveCost:
    """One flow over the link that takes longer; the other keeps pace with it."""
    intra_bytes = total if route.local > 1 else 0.0
    inter_bytes = total / route.local
    intra_s = intra_bytes / route.intra_rate(op)
    inter_s = inter_bytes / route.inter_rate(op) if route.nodes > 1 else 0.0
    is_inter = inter_s > intra_s
    return CollectiveCost(
        latency_ns=math.ceil(latency_ns),
        bytes=math.ceil(inter_bytes if is_inter else intra_bytes),
        rate_cap_bytes_per_s=route.inter_rate(op) if is_inter else route.intra_rate(op),
        link="inter" if is_inter else "intra",
        source=ANALYTIC,
        algorithm="ring",
    )


def _send(route: Route, work: CollectiveWork) -> CollectiveCost:
    """One message; over the network it uses one NIC at most."""
    is_inter = route.nodes > 1
    rate = route.intra_rate("send")
    if is_inter:
        rate = min(route.nic.rate("send"), route.inter_rate("send"))
    return CollectiveCost(
        latency_ns=math.ceil(_startup_ns(route, "send", 1)),
        bytes=work.bytes,
        rate_cap_bytes_per_s=rate,
        link="inter" if is_inter else "intra",
        source=ANALYTIC,
        algorithm="send",
    )


def _startup_ns(route: Route, op: str, passes: int) -> float:
    """What a group of two costs before its bytes; a ring of n ranks costs it n-1 times."""
    if route.nodes == 1:
        return route.intra.startup_ns.get(op, passes * route.intra_hop_ns)
    return route.nic.startup_ns.get(op, passes * route.inter_hop_ns)
