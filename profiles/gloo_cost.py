"""What a collective of gloo costs: its own rounds over TCP, whatever the links are.

Asked by `collective_cost` for groups of CPU ranks. A round waits for two hops of the link, as data
is asked for before it comes (transport/tcp/pair.cc), and then for its bytes:

    all_gather      n-1 rounds of a ring, S/n in each (allgather.cc)
    all_reduce      the same twice (allreduce.cc); torch's reduce_scatter is one, too
    all_to_all      one round: all messages are asked for and sent at once (alltoall.cc)
    broadcast       a binomial tree, whose receivers ask at the start (broadcast.cc)

A ring sends each part in two segments, and while one travels the other is asked for. The word
travels behind the own segment, so with `s` for a segment on the wire and `h` for a hop a round
lasts s + h + max(s, h), and the last segment comes min(s, h) later.

In an all_to_all all send first to whoever asked first. Its messages wait for its way in, and those
that go out last wait as long for theirs, but no longer than TCP sends to one rank unasked.

Bytes as interface counters saw them (torch 2.13, 2 and 4 ranks); times against measured ones:
docs/shaped_compression.md. Assumes: ranks begin together; copies, sums and the segments of long
parts are in the link's rate.
"""

from __future__ import annotations

import math
from dataclasses import replace

from claw_plan.profiles.collective_route import Route
from claw_plan.profiles.cost import ANALYTIC, CollectiveCost
from claw_plan.profiles.units import NS_PER_S
from claw_plan.profiles.work import CollectiveWork

_PASSES = {"all_reduce": 2, "reduce_scatter": 2, "all_gather": 1}
"""How often a ring goes round."""

_PAIR_HOPS = {"all_reduce": 4, "reduce_scatter": 4}
_PAIR_HOPS |= {"all_gather": 2, "all_to_all": 2, "broadcast": 2, "send": 1}
"""Hops that a group of two waits for; a message's receiver is taken to have asked. Measured
between two hosts, a message in 2.2 ms: all_reduce 8.7 ms, all others 4.4 (torch 2.13)."""

_TINY_BYTES = 4
"""A rank: of buffers no larger most segments are empty, and nobody waits for those (between two
hosts 4 bytes took half as long as 64)."""

_BURST_BYTES = 90_000
"""What TCP sends before it waits for the other end: ten segments (RFC 6928) of 9000 bytes."""


def gloo_collective(route: Route, work: CollectiveWork) -> CollectiveCost:
    """The collective alone on its links, other groups doing the same."""
    if work.op == "send":
        return _send(route, work)
    if work.op == "all_to_all":
        return _direct(route, work)
    if work.op == "broadcast":
        return _tree(route, work)
    return _ring(route, work)


def _ring(route: Route, work: CollectiveWork) -> CollectiveCost:
    passes, rounds = _PASSES[work.op], route.ranks - 1
    total = passes * rounds * work.bytes / route.ranks
    flow = _flow(route, work.op, total if route.local > 1 else 0.0, total / route.local)
    hop_ns = _pair_ns(route, work.op) / _PAIR_HOPS[work.op]
    segment_ns = (flow.alone_ns - flow.latency_ns) / (2 * passes * rounds)
    if passes == 2 and work.bytes <= _TINY_BYTES * route.ranks:
        wait_ns = passes * rounds * hop_ns
    else:
        of_round_ns = hop_ns + max(0.0, hop_ns - segment_ns)
        wait_ns = passes * (rounds * of_round_ns + min(hop_ns, segment_ns))
    return replace(flow, latency_ns=math.ceil(wait_ns), algorithm="ring")


def _direct(route: Route, work: CollectiveWork) -> CollectiveCost:
    part = work.bytes / route.ranks
    inside, between = (route.local - 1) * part, (route.ranks - route.local) * part
    flow = _flow(route, work.op, inside, between)
    wait_ns = _pair_ns(route, work.op)
    if route.nodes > 2:
        unasked = route.local * min(part, _BURST_BYTES)
        wait_ns += (route.nodes - 2) * unasked * NS_PER_S / route.inter_rate(work.op)
    return replace(flow, latency_ns=math.ceil(wait_ns), algorithm="direct")


def _tree(route: Route, work: CollectiveWork) -> CollectiveCost:
    doublings = math.ceil(math.log2(route.ranks))
    total = float(doublings * work.bytes)
    flow = _flow(route, work.op, total if route.local > 1 else 0.0, total / route.local)
    wait_ns = (doublings + 1) / 2 * _pair_ns(route, work.op)
    return replace(flow, latency_ns=math.ceil(wait_ns), algorithm="tree")


def _flow(route: Route, op: str, intra_bytes: float, inter_bytes: float) -> CollectiveCost:
    """A rank's bytes as one flow over the link that takes longer; the other keeps pace with it."""
    intra_s = intra_bytes / route.intra_rate(op)
    inter_s = inter_bytes / route.inter_rate(op) if route.nodes > 1 else 0.0
    is_inter = inter_s > intra_s
    return CollectiveCost(
        latency_ns=0,
        bytes=math.ceil(inter_bytes if is_inter else intra_bytes),
        rate_cap_bytes_per_s=route.inter_rate(op) if is_inter else route.intra_rate(op),
        link="inter" if is_inter else "intra",
        source=ANALYTIC,
    )


def _send(route: Route, work: CollectiveWork) -> CollectiveCost:
    """One message; over the network it uses one NIC at most."""
    is_inter = route.nodes > 1
    rate = route.intra_rate("send")
    if is_inter:
        rate = min(route.nic.rate("send"), route.inter_rate("send"))
    return CollectiveCost(
        latency_ns=math.ceil(_pair_ns(route, "send")),
        bytes=work.bytes,
        rate_cap_bytes_per_s=rate,
        link="inter" if is_inter else "intra",
        source=ANALYTIC,
        algorithm="send",
    )


def _pair_ns(route: Route, op: str) -> float:
    """What a group of two costs before its bytes: measured with the link, else its hops."""
    link, hop_ns = route.intra, route.intra_hop_ns
    if route.nodes > 1:
        link, hop_ns = route.nic, route.inter_hop_ns
    return link.startup_ns.get(op, _PAIR_HOPS[op] * hop_ns)
