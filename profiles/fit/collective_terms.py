"""Rows of measured collectives to arrays: what each way of each row asks of every constant.

`nccl_cost.ways` counts a collective's hops and bytes; here these counts stand in columns, so that
the fit evaluates `nccl_cost`'s own formulas on all rows at once, thousands of times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from claw_plan.profiles import nccl_cost
from claw_plan.profiles.cluster import Network, Node
from claw_plan.profiles.collective_constants import link_family
from claw_plan.profiles.collective_route import Route, route
from claw_plan.profiles.work import CollectiveWork

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTiming:
    """One measured collective on nodes like `node`; `library` is 'nccl' or 'rccl'.

    Rows of one `group` come from one source, GPU and collective.
    """

    node: Node
    network: Network
    work: CollectiveWork
    library: str
    measured_ns: float
    group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Columns over all parts of all choices of all rows, and where each choice and row begins.

    `names` are the constants' names, and `of[kind]` the positions in it that a way uses.
    """

    names: tuple[str, ...]
    of: Mapping[str, Index]
    counts: Mapping[str, Array]
    first_part: Index
    first_choice: Index


def terms_of(timings: Sequence[CollectiveTiming]) -> Terms:
    """The columns of these rows, their ways in the order of `nccl_cost`."""
    uses: list[dict[str, str]] = []
    counts: list[dict[str, float]] = []
    first_choice: list[int] = []
    first_part: list[int] = []
    for timing in timings:
        first_choice.append(len(first_part))
        way_of = route(timing.node, timing.network, timing.work)
        for parts in nccl_cost.choices(way_of, timing.work):
            first_part.append(len(uses))
            for way, protocol in parts:
                uses.append(_constants(timing, way_of, way, protocol))
                counts.append(_counts(way_of, way))
    names = sorted({name for use in uses for name in use.values()})
    position = {name: index for index, name in enumerate(names)}
    kinds = uses[0].keys()
    return Terms(
        names=tuple(names),
        of={kind: np.array([position[use[kind]] for use in uses]) for kind in kinds},
        counts={key: np.array([count[key] for count in counts]) for key in counts[0]},
        first_part=np.array(first_part),
        first_choice=np.array(first_choice),
    )


def rate_kind(op: str) -> str:
    """Which of a link's rates a collective is held to."""
    return op if op in ("all_reduce", "all_to_all", "send", "nvls") else "other"


def _constants(
    timing: CollectiveTiming, way_of: Route, way: nccl_cost.Way, protocol: str
) -> dict[str, str]:
    """The names of the constants that one way uses."""
    near, far = link_family(way_of.intra.name), link_family(way_of.nic.name)
    library = timing.library
    return {
        "launch": f"launch {near}",
        "piece": f"{library} piece",
        "drain": f"{library} drain",
        "exchange": f"{library} exchange",
        "fill": f"{library} fill {nccl_cost.fill_name(way, protocol)}",
        "hop": f"hop {near}" if way.intra_hops else "one",
        "hop share": _share(library, protocol, "hop"),
        "network hop": f"hop {far}" if way.inter_hops else "one",
        "network hop share": _share(library, protocol, "network_hop"),
        "rate": f"rate {near} {rate_kind(way.intra)}" if way.intra_bytes else "one",
        "rate share": _share(library, protocol, "rate"),
        "network rate": f"rate {far} {rate_kind(way.inter)}" if way.inter_bytes else "one",
        "network rate share": _share(library, protocol, "network_rate"),
    }


def _share(library: str, protocol: str, what: str) -> str:
    is_plain = protocol == "simple" or (protocol == "nvls" and what != "hop")
    return "one" if is_plain else f"{library} {protocol} {what}"


def _counts(way_of: Route, way: nccl_cost.Way) -> dict[str, float]:
    """Hops, and seconds at the links' whole rates."""
    intra = way_of.intra.bytes_per_s * way_of.port_share
    inter = way_of.nic.bytes_per_s * (way.nics or way_of.nics)
    return {
        "hops": way.intra_hops,
        "network hops": way.inter_hops,
        "peers": way.peers,
        "streams": way.streams,
        "pieces": way.pieces,
        "drains": way.drains,
        "idle ns": 0.0 if way_of.nodes > 1 else way.idle_bytes / intra * 1e9,
        "network idle ns": way.idle_bytes / inter * 1e9 if way_of.nodes > 1 else 0.0,
        "ns": way.intra_bytes / intra * 1e9,
        "network ns": way.inter_bytes / inter * 1e9,
    }


def times_ns(terms: Terms, constants: Array) -> Array:
    """Each row's time by its fastest way; `constants` in the order of `terms.names`."""
    at = {kind: constants[index] for kind, index in terms.of.items()}
    counts = terms.counts
    near_hop, far_hop = at["hop"] * at["hop share"], at["network hop"] * at["network hop share"]
    latency = nccl_cost.latency_ns(
        counts["hops"] * near_hop + counts["network hops"] * far_hop,
        peers=counts["peers"],
        pieces=counts["pieces"],
        launch_ns=at["launch"],
        piece_ns=at["piece"],
        exchange_ns=at["exchange"],
    )
    flow = np.maximum(
        counts["ns"] / (at["rate"] * at["rate share"]),
        counts["network ns"] / (at["network rate"] * at["network rate share"]),
    ) * (1 + at["drain"] * counts["drains"])
    idle = counts["idle ns"] / (at["rate"] * at["rate share"])
    idle += counts["network idle ns"] / (at["network rate"] * at["network rate share"])
    hop = near_hop * (counts["hops"] > 0) + far_hop * (counts["network hops"] > 0)
    parts = idle + latency + flow + nccl_cost.fill_ns(hop, flow, at["fill"], counts["streams"])
    longest = np.maximum.reduceat(parts, terms.first_part)
    fastest: Array = np.minimum.reduceat(longest, terms.first_choice)
    return fastest
