"""Physics of one collective: `CollectiveWork` on a `Node`'s links to a `CollectiveCost`.

n ranks on N nodes, r = n/N on each; S bytes; a, B latency and rate of a hop inside a node; a', B'
of a hop between nodes, B' being one device's share of its node's NICs.

ring, one node         steps*(a + S/(n B)); steps 2(n-1) for all_reduce, n-1 for all_gather and
                       reduce_scatter
ring, N nodes          one ring through all ranks, n-N hops inside and N-1 between; every rail
                       carries its part, so a port carries 1/r of the node's bytes
tree (all_reduce)      2 log2(n) a + 2 S/B, pipelined double binary; between nodes
                       2 (log2(N) a' + (r-1) a)
hierarchical           inside, then between on 1/r of the data, then inside
auto                   what NCCL does: ring; for all_reduce between nodes tree where it is faster

Source: NCCL's ring and double binary tree (S. Jeaugey, 'Massively Scale Your Deep Learning
Training with NCCL 2.4', NVIDIA developer blog, 2019); bus bandwidth as nccl-tests' PERFORMANCE.md.
Assumes: ranks spread evenly over the nodes, all devices of a node doing the same at once.
Not modelled: protocols (LL, LL128) and channel counts; their effect is in the fitted rates.

gloo runs rings over TCP whatever the links are, with its own bytes: its reduce_scatter moves as
many as all_reduce (interface counters, torch 2.13, 2 and 4 ranks).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from claw_plan.profiles.cluster import Link, Network, Node
from claw_plan.profiles.cost import ANALYTIC, CollectiveCost
from claw_plan.profiles.work import CollectiveWork

_RING_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
_GLOO_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 2, "all_to_all": 1}


@dataclass(frozen=True, slots=True)
class _Route:
    """What the ranks of a group see of the hardware; rates are of one rank's port."""

    ranks: int
    nodes: int
    local: int
    intra_hop_ns: float
    inter_hop_ns: float
    intra_bytes_per_s: float
    inter_bytes_per_s: float


def analytic_collective(node: Node, network: Network, work: CollectiveWork) -> CollectiveCost:
    """The collective on nodes like `node`, alone in its group, other groups doing the same."""
    if work.group_size == 1 or work.bytes == 0:
        return CollectiveCost(
            latency_ns=0, bytes=0, rate_cap_bytes_per_s=1.0, link="intra", source=ANALYTIC
        )
    route = _route(node, network, work)
    if work.op == "send":
        return _send(node, route, work)
    if work.backend == "gloo":
        return _gloo(node, route, work)
    if work.op == "all_to_all":
        return _all_to_all(route, work)
    if work.algorithm == "hierarchical" and route.nodes > 1 and route.local > 1:
        return _hierarchical(route, work)
    ring = _ring(route, work)
    if work.op not in ("all_reduce", "broadcast") or work.algorithm in ("ring", "hierarchical"):
        return ring
    if work.algorithm == "tree":
        return _tree(route, work)
    # Inside a node NCCL's tree is a chain, which is never faster than the ring.
    if route.nodes == 1:
        return ring
    return min(ring, _tree(route, work), key=lambda cost: cost.alone_ns)


def _route(node: Node, network: Network, work: CollectiveWork) -> _Route:
    share = node.nic_count / node.device_count / network.oversubscription
    return _Route(
        ranks=work.group_size,
        nodes=work.nodes,
        local=max(1, work.group_size // work.nodes),
        intra_hop_ns=node.intra.latency_ns,
        inter_hop_ns=node.nic.latency_ns + network.latency_ns,
        intra_bytes_per_s=node.intra.rate(work.op),
        inter_bytes_per_s=node.nic.rate(work.op) * share,
    )


def _flow(
    route: _Route, latency_ns: float, intra_bytes: float, inter_bytes: float
) -> CollectiveCost:
    """One flow over the link that takes longer; the other keeps pace with it."""
    intra_s = intra_bytes / route.intra_bytes_per_s
    inter_s = inter_bytes / route.inter_bytes_per_s if route.nodes > 1 else 0.0
    is_inter = inter_s > intra_s
    return CollectiveCost(
        latency_ns=math.ceil(latency_ns),
        bytes=math.ceil(inter_bytes if is_inter else intra_bytes),
        rate_cap_bytes_per_s=route.inter_bytes_per_s if is_inter else route.intra_bytes_per_s,
        link="inter" if is_inter else "intra",
        source=ANALYTIC,
    )


def _pass_latency_ns(route: _Route) -> float:
    """The hops of one way through all ranks."""
    inside = route.ranks - route.nodes
    return inside * route.intra_hop_ns + (route.nodes - 1) * route.inter_hop_ns


def _ring(route: _Route, work: CollectiveWork) -> CollectiveCost:
    if work.op == "broadcast":
        latency_ns, total = _pass_latency_ns(route), float(work.bytes)
    else:
        passes = _RING_PASSES[work.op]
        latency_ns = passes * _pass_latency_ns(route)
        total = passes * (route.ranks - 1) * work.bytes / route.ranks
    intra = total if route.local > 1 else 0.0
    return _flow(route, latency_ns, intra, total / route.local)


def _tree(route: _Route, work: CollectiveWork) -> CollectiveCost:
    ways = 2 if work.op == "all_reduce" else 1
    if route.nodes == 1:
        latency_ns = ways * math.ceil(math.log2(route.ranks)) * route.intra_hop_ns
        return _flow(route, latency_ns, ways * work.bytes, 0.0)
    between_ns = math.ceil(math.log2(route.nodes)) * route.inter_hop_ns
    inside_ns = (route.local - 1) * route.intra_hop_ns
    total = float(ways * work.bytes)
    intra = total if route.local > 1 else 0.0
    return _flow(route, ways * (between_ns + inside_ns), intra, total / route.local)


def _hierarchical(route: _Route, work: CollectiveWork) -> CollectiveCost:
    """The part inside the nodes comes first and does not overlap: it is in the latency."""
    passes = _RING_PASSES.get(work.op, 1)
    share = 1.0 if work.op == "broadcast" else (route.local - 1) / route.local
    inside_bytes = passes * share * work.bytes
    inside_ns = passes * (route.local - 1) * route.intra_hop_ns
    inside_ns += inside_bytes / route.intra_bytes_per_s * 1e9
    between_ns = passes * (route.nodes - 1) * route.inter_hop_ns
    across = passes * (route.nodes - 1) / route.nodes * work.bytes / route.local
    return CollectiveCost(
        latency_ns=math.ceil(inside_ns + between_ns),
        bytes=math.ceil(across),
        rate_cap_bytes_per_s=route.inter_bytes_per_s,
        link="inter",
        source=ANALYTIC,
    )


def _all_to_all(route: _Route, work: CollectiveWork) -> CollectiveCost:
    """Every rank sends 1/n of its buffer to every other, all at once."""
    hop_ns = route.inter_hop_ns if route.nodes > 1 else route.intra_hop_ns
    latency_ns = math.ceil(math.log2(route.ranks)) * hop_ns
    near = (route.local - 1) / route.ranks * work.bytes
    far = (route.ranks - route.local) / route.ranks * work.bytes
    return _flow(route, latency_ns, near, far)


def _send(node: Node, route: _Route, work: CollectiveWork) -> CollectiveCost:
    """One message; over the network it uses one NIC at most, and its device's share of all."""
    link = node.intra if route.nodes == 1 else node.nic
    hop_ns = route.intra_hop_ns if route.nodes == 1 else route.inter_hop_ns
    rate = route.intra_bytes_per_s
    if route.nodes > 1:
        rate = min(node.nic.rate("send"), route.inter_bytes_per_s)
    return CollectiveCost(
        latency_ns=link.startup_ns.get("send", math.ceil(hop_ns)),
        bytes=work.bytes,
        rate_cap_bytes_per_s=rate,
        link="intra" if route.nodes == 1 else "inter",
        source=ANALYTIC,
    )


def _gloo(node: Node, route: _Route, work: CollectiveWork) -> CollectiveCost:
    link = node.intra if route.nodes == 1 else node.nic
    doublings = math.ceil(math.log2(route.ranks))
    if work.op == "broadcast":
        latency_ns = doublings * _gloo_startup_ns(link, work.op, 1, route)
        total = float(doublings * work.bytes)
    else:
        passes = _GLOO_PASSES[work.op]
        latency_ns = (route.ranks - 1) * _gloo_startup_ns(link, work.op, passes, route)
        total = passes * (route.ranks - 1) * work.bytes / route.ranks
    intra = total if route.local > 1 else 0.0
    return _flow(route, latency_ns, intra, total / route.local)


def _gloo_startup_ns(link: Link, op: str, passes: int, route: _Route) -> float:
    """What a group of two costs before its bytes; a ring of n ranks costs it n-1 times."""
    hop_ns = route.intra_hop_ns if route.nodes == 1 else route.inter_hop_ns
    return link.startup_ns.get(op, passes * hop_ns)
