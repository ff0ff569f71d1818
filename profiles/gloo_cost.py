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

_HOPS = {"all_reduce": 5.0, "reduce_scatter": 5.0, "all_gather": 2.0, "all_to_all": 2.0}
_HOPS |= {"broadcast": 2.0, "send": 1.0}
"""Hops of the link in a step of the ring. Data is asked for before it comes, which makes two; a
pass of a reduction has half a hop more. Measured: links of 2 ms, between 2 ranks an all_reduce
starts in 10 ms, among 4 on two hosts an all_reduce in 29, a reduce_scatter in 32, an all_gather in
12 (torch 2.13). A message's receiver is taken to wait."""

_TINY_BYTES = 8
"""A rank: of buffers no larger most parts of the ring are empty, which halves an all_reduce's hops
(4 bytes between 2 ranks: 5 ms on that link)."""


def gloo_collective(route: Route, work: CollectiveWork) -> CollectiveCost:
    """The collective alone on its links, other groups doing the same."""
    if work.op == "send":
        return _send(route, work)
    doublings = math.ceil(math.log2(route.ranks))
    if work.op == "broadcast":
        latency_ns = doublings * _startup_ns(route, work)
        total = float(doublings * work.bytes)
    else:
        passes = _PASSES[work.op]
        latency_ns = (route.ranks - 1) * _startup_ns(route, work)
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
        latency_ns=math.ceil(_startup_ns(route, work)),
        bytes=work.bytes,
        rate_cap_bytes_per_s=rate,
        link="inter" if is_inter else "intra",
        source=ANALYTIC,
        algorithm="send",
    )


def _startup_ns(route: Route, work: CollectiveWork) -> float:
    """What a group of two costs before its bytes; a ring of n ranks costs it n-1 times."""
    hops = _HOPS[work.op]
    if work.op == "all_reduce" and work.bytes <= _TINY_BYTES * route.ranks:
        hops /= 2
    if route.nodes == 1:
        return route.intra.startup_ns.get(work.op, hops * route.intra_hop_ns)
    return route.nic.startup_ns.get(work.op, hops * route.inter_hop_ns)
