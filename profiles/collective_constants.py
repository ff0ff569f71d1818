"""The fitted constants of collective libraries and links, as `profiles.fit` wrote them.

`tables/collectives.yaml` is made from published timings by `fit/collectives.py`; the catalogue
takes its links' latencies and rates from it, `nccl_cost` the libraries' constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from claw_plan.profiles.files import read_yaml

TABLE = Path(__file__).parent / "tables" / "collectives.yaml"

_NETWORKS = {"ib": "infiniband", "roce": "infiniband", "efa": "efa"}
"""RDMA over Ethernet behaves as InfiniBand: the NICs are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How one protocol differs from Simple: time of a hop, and rate, on both kinds of links."""

    name: str
    hop: float = 1.0
    network_hop: float = 1.0
    rate: float = 1.0
    network_rate: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A collective library; see `nccl_cost` for what the constants mean.

    `launch_ns` is for links whose own is not known. `spread_small` and `spread_large` are the
    relative errors that two thirds of the rows of groups left out of the fit keep to, below and
    from 1 MiB on.
    """

    name: str
    launch_ns: float
    piece_ns: float
    drain: float
    exchange_ns: float
    fill: Mapping[str, float]
    protocols: Mapping[str, Protocol]
    spread_small: float = 0.0
    spread_large: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConstants:
    """What a family of links does: a launch and a hop, and the share of the rate in use."""

    hop_ns: int
    share: Mapping[str, float]
    launch_ns: int | None = None


def link_family(name: str) -> str:
    """The links that share constants: one generation of switch, or one kind of network."""
    return _NETWORKS.get(name.partition("-")[0], name)


def link_constants(name: str) -> LinkConstants | None:
    """The fitted constants of a link of the catalogue; None where nothing was fitted."""
    return _table()[1].get(link_family(name))


def library(device_kind: str) -> Library:
    """The library of a kind of device ('cuda', 'rocm')."""
    return _table()[0]["rccl" if device_kind == "rocm" else "nccl"]


def provenance() -> str:
    """What the constants were fitted to."""
    return _table()[2]


@cache
def _table() -> tuple[Mapping[str, Library], Mapping[str, LinkConstants], str]:
    data = read_yaml(TABLE).data
    libraries = {name: _library(name, entry) for name, entry in data["libraries"].items()}
    links = {name: LinkConstants(**entry) for name, entry in data["links"].items()}
    return libraries, links, ", ".join(data["from"])


def _library(name: str, entry: Mapping[str, Any]) -> Library:
    plain = {key: value for key, value in entry.items() if key != "protocols"}
    shares = entry["protocols"].items()
    protocols = {protocol: Protocol(name=protocol, **each) for protocol, each in shares}
    return Library(name=name, protocols=protocols, **plain)
