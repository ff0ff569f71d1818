"""What a collective of NCCL or RCCL costs: the fastest of the ways the library has.

A `Way` is one algorithm in one protocol, counted in hops and bytes (`ways`); the constants of the
library and of the links turn it into a time (`flow_ns`). n ranks on N nodes, r on each; S bytes.

ring          passes*(n-1) steps of S/n, passes 2 for all_reduce, else 1; of the hops n-N lie
              inside a node and N-1 between; every rail carries its part, so a port of the
              network carries 1/r of the bytes
tree          all_reduce: a double binary tree over the nodes, a chain inside: 2 log2(N) hops
              between and 2(r-1) inside; a node sends S over the network when there are two (each
              tree one way), else 2 S, and 2 S go through each port inside
nvls          all_reduce in the switch: each rank sends S up and receives S
nvls_tree     the same inside, the tree between the nodes
all_to_all    every rank sends S/n to every other at once
hierarchical  (only when asked for) ring inside, ring between on S/r, ring inside

Protocols: LL sends a flag with every 4 bytes and LL128 one with every 120, so both start sooner
and have less rate than Simple. A ring's last step only copies: with few ranks that shows (`drain`
of a step). Chunks pass one hop after the other; k chunks over a flow of b lose k hops a, and more
chunks fill the pipeline sooner: the best k loses 2 sqrt(a b), and `fill` is how much of that.

Sources: NCCL's algorithms and protocols (S. Jeaugey, 'Massively Scale Your Deep Learning Training
with NCCL 2.4', NVIDIA developer blog, 2019; github NVIDIA/nccl, src/graph/tuning.cc); bus
bandwidth as nccl-tests' PERFORMANCE.md. Not modelled: that NCCL's own choice misses the fastest
way for some sizes, where measured times step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from claw_plan.profiles.collective_constants import Library, Protocol
from claw_plan.profiles.collective_route import Route
from claw_plan.profiles.cost import ANALYTIC, CollectiveCost
from claw_plan.profiles.work import CollectiveWork

Number = TypeVar("Number", float, npt.NDArray[np.float64])
"""The formulas hold for one collective, and for all rows of a fit at once."""

SMALL_BYTES = 1 << 20
"""Below, latency decides, and published times of one collective differ by more."""

PROTOCOLS = ("ll", "ll128", "simple")

LL_PEER_BYTES = 32 * 16 * 1024
"""Up to so many bytes a peer, exchanges use LL: NCCL_P2P_LL_THRESHOLD, 16 KiB, on each of the 32
channels (github NVIDIA/nccl, src/enqueue.cc); published all-to-alls step there."""

IDLE_BYTES = 400e6
"""Beyond so many bytes a rank, an exchange's idle rounds are hidden by others (all-to-alls of 18,
36 and 72 ranks on GB200, XLA's table)."""

_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One algorithm, counted: hops in a row, and bytes through the busiest port of each link.

    `intra` and `inter` name the rates (see `Link.rate`). `peers` is how many others a rank
    exchanges with at once. `drains` is the part of a step that the last copy adds to the ring.
    `nics` is set when fewer carry it than the rank's part. `pieces` are buffers that the framework
    hands over one by one.
    """

    algorithm: str
    intra_hops: float = 0.0
    inter_hops: float = 0.0
    intra_bytes: float = 0.0
    inter_bytes: float = 0.0
    intra: str = "other"
    inter: str = "other"
    nics: float = 0.0
    idle_bytes: float = 0.0
    peers: int = 0
    streams: int = 1
    pieces: int = 0
    drains: float = 0.0


def nccl_collective(route: Route, work: CollectiveWork, library: Library) -> CollectiveCost:
    """The collective alone in its group, by the fastest way."""
    costs = (
        _longest([_cost(way, library.protocols[name], route, library) for way, name in parts])
        for parts in choices(route, work)
    )
    fastest = min(costs, key=lambda cost: cost.alone_ns)
    is_small = work.bytes < SMALL_BYTES
    return replace(fastest, spread=library.spread_small if is_small else library.spread_large)


def choices(route: Route, work: CollectiveWork) -> Iterator[tuple[tuple[Way, str], ...]]:
    """What the library picks the fastest of: ways, each in a protocol.

    A choice of several parts takes as long as the longest of them.
    """
    if work.op == "all_to_all":
        yield tuple(_exchange(route, work))
        return
    for way in _ways(route, work):
        for protocol in ("nvls",) if way.intra == "nvls" else PROTOCOLS:
            yield ((way, protocol),)


def _exchange(route: Route, work: CollectiveWork) -> Iterator[tuple[Way, str]]:
    """LL while the message to each peer is short, then Simple.

    Simple is faster than LL just above the limit; so that more bytes never take less time, what
    LL took at the limit is the least.
    """
    limit = LL_PEER_BYTES * route.ranks
    yield _all_to_all(route, replace(work, bytes=min(work.bytes, limit))), "ll"
    if work.bytes > limit:
        yield _all_to_all(route, work), "simple"


def _longest(costs: list[CollectiveCost]) -> CollectiveCost:
    """The last part, starting so late that it ends with the longest."""
    last = costs[-1]
    late_ns = max(cost.alone_ns for cost in costs) - last.alone_ns
    return replace(last, latency_ns=last.latency_ns + late_ns) if late_ns else last


def latency_ns(
    hops_ns: Number,
    *,
    peers: Number,
    pieces: Number,
    launch_ns: Number,
    piece_ns: Number,
    exchange_ns: Number,
) -> Number:
    """The start of the kernel and the hops in a row, before any byte is counted."""
    return launch_ns + pieces * piece_ns + hops_ns + peers**2 * exchange_ns


def fill_ns(hop: Number, flow: Number, fill: Number, streams: Number) -> Number:
    """What chunks that wait for a hop each add to the flow; streams do so side by side."""
    product: Number = hop * flow
    filled: Number = 2 * fill / streams * product**0.5
    return filled


def fill_name(way: Way, protocol: str) -> str:
    """Under which name a library keeps how much of the fill the way pays."""
    return f"ring {protocol}" if way.algorithm in ("ring", "hierarchical") else way.algorithm


def _cost(way: Way, protocol: Protocol, route: Route, library: Library) -> CollectiveCost:
    launch_ns = route.intra.launch_ns
    near_hop_ns = route.intra_hop_ns * protocol.hop
    far_hop_ns = route.nic.latency_ns * protocol.network_hop + route.network_ns
    depth_ns = latency_ns(
        way.intra_hops * near_hop_ns + way.inter_hops * far_hop_ns,
        peers=way.peers,
        pieces=way.pieces,
        launch_ns=library.launch_ns if launch_ns is None else launch_ns,
        piece_ns=library.piece_ns,
        exchange_ns=library.exchange_ns,
    )
    slowed = 1 + library.drain * way.drains
    intra_rate = route.intra_rate(way.intra) * protocol.rate / slowed
    nics = way.nics or route.nics
    inter_rate = route.nic.rate(way.inter) * nics * protocol.network_rate / slowed
    intra_ns = way.intra_bytes / intra_rate * 1e9
    idle_ns = way.idle_bytes / (inter_rate if route.nodes > 1 else intra_rate) * 1e9
    inter_ns = way.inter_bytes / inter_rate * 1e9
    if way.algorithm == "hierarchical":
        # The part inside the nodes comes first and does not overlap.
        depth_ns, intra_ns = depth_ns + intra_ns, 0.0
    is_inter = inter_ns > intra_ns
    flow_ns = max(intra_ns, inter_ns)
    hop_ns = near_hop_ns * (way.intra_hops > 0) + far_hop_ns * (way.inter_hops > 0)
    filling_ns = fill_ns(hop_ns, flow_ns, library.fill[fill_name(way, protocol.name)], way.streams)
    return CollectiveCost(
        latency_ns=math.ceil(depth_ns + idle_ns + filling_ns),
        bytes=math.ceil(way.inter_bytes if is_inter else way.intra_bytes),
        rate_cap_bytes_per_s=inter_rate if is_inter else intra_rate,
        link="inter" if is_inter else "intra",
        source=ANALYTIC,
        algorithm=way.algorithm,
        protocol=protocol.name,
    )


def _ways(route: Route, work: CollectiveWork) -> Iterator[Way]:
    """The algorithms that the library has for this collective, or the one asked for."""
    if work.op == "send":
        yield _send(route, work)
    elif work.algorithm == "hierarchical" and route.nodes > 1 and route.local > 1:
        yield _hierarchical(route, work)
    else:
        yield from _rings_and_trees(route, work)


def _rings_and_trees(route: Route, work: CollectiveWork) -> Iterator[Way]:
    if work.algorithm == "tree" and work.op in ("all_reduce", "broadcast"):
        yield _tree(route, work)
        return
    yield _ring(route, work)
    if work.op != "all_reduce" or work.algorithm != "auto":
        return
    # Inside a node NCCL's tree is a chain, which is never faster than the ring.
    if route.nodes > 1:
        yield _tree(route, work)
    if route.intra.nvls and route.local > 2:
        yield _in_switch(route, work)


def _ring(route: Route, work: CollectiveWork) -> Way:
    passes = _PASSES[work.op]
    total = float(work.bytes)
    if work.op != "broadcast":
        total = passes * (route.ranks - 1) * work.bytes / route.ranks
    return Way(
        algorithm="ring",
        intra_hops=passes * (route.ranks - route.nodes),
        inter_hops=passes * (route.nodes - 1),
        intra_bytes=total if route.local > 1 else 0.0,
        inter_bytes=total / route.local if route.nodes > 1 else 0.0,
        intra=work.op,
        inter=work.op,
        pieces=route.ranks if work.op in ("all_gather", "reduce_scatter") else 0,
        drains=0.0 if work.op == "broadcast" else 1 / (passes * (route.ranks - 1)),
    )


def _tree(route: Route, work: CollectiveWork) -> Way:
    times = 2 if work.op == "all_reduce" else 1
    if route.nodes == 1:
        return Way(
            algorithm="tree",
            intra_hops=times * math.ceil(math.log2(route.ranks)),
            intra_bytes=float(times * work.bytes),
            intra=work.op,
        )
    return Way(
        algorithm="tree",
        intra_hops=times * (route.local - 1),
        inter_hops=times * math.ceil(math.log2(route.nodes)),
        intra_bytes=float(times * work.bytes) if route.local > 1 else 0.0,
        inter_bytes=_tree_bytes(route, work),
        intra=work.op,
        inter=work.op,
    )


def _tree_bytes(route: Route, work: CollectiveWork) -> float:
    """What one rail of the busiest node sends."""
    times = 2 if work.op == "all_reduce" and route.nodes > 2 else 1
    return times * work.bytes / route.local


def _in_switch(route: Route, work: CollectiveWork) -> Way:
    far = route.nodes > 1
    return Way(
        algorithm="nvls_tree" if far else "nvls",
        intra_hops=2.0,
        inter_hops=2.0 * math.ceil(math.log2(route.nodes)),
        intra_bytes=float(work.bytes),
        inter_bytes=_tree_bytes(route, work) if far else 0.0,
        intra="nvls",
        inter=work.op,
    )


def _all_to_all(route: Route, work: CollectiveWork) -> Way:
    far = route.nodes > 1
    near_bytes = (route.local - 1) / route.ranks * work.bytes
    far_bytes = (route.ranks - route.local) / route.ranks * work.bytes
    return Way(
        algorithm="all_to_all",
        intra_hops=0.0 if far else 1.0,
        inter_hops=1.0 if far else 0.0,
        intra_bytes=near_bytes,
        inter_bytes=far_bytes,
        intra=work.op,
        inter=work.op,
        idle_bytes=_idle_share(route.ranks) * min(far_bytes if far else near_bytes, IDLE_BYTES),
        peers=route.ranks - 1,
        streams=route.ranks - 1,
        pieces=route.ranks,
    )


def _idle_share(ranks: int) -> float:
    """Partners are paired over the next power of two of ranks; who has none waits."""
    return (1 << (ranks - 1).bit_length()) / ranks - 1


def _send(route: Route, work: CollectiveWork) -> Way:
    if route.nodes == 1:
        return Way(algorithm="send", intra_hops=1.0, intra_bytes=float(work.bytes), intra="send")
    # One message uses one NIC at most, however many its device has.
    return Way(
        algorithm="send",
        inter_hops=1.0,
        inter_bytes=float(work.bytes),
        inter="send",
        nics=min(1.0, route.nics),
    )


def _hierarchical(route: Route, work: CollectiveWork) -> Way:
    passes = _PASSES[work.op]
    share = 1.0 if work.op == "broadcast" else (route.local - 1) / route.local
    return Way(
        algorithm="hierarchical",
        intra_hops=passes * (route.local - 1),
        inter_hops=passes * (route.nodes - 1),
        intra_bytes=passes * share * work.bytes,
        inter_bytes=passes * (route.nodes - 1) / route.nodes * work.bytes / route.local,
        intra=work.op,
        inter=work.op,
    )
