"""What the constants of collectives are as a rule, before anything is measured.

A constant is the mean of its kind times a deviation of its own, so that a link that no row of
the fit uses gets what its kind shows. Means have priors from NCCL's own tables.

Sources: hop latencies and the protocols' shares of the rate: github NVIDIA/nccl,
src/graph/tuning.cc (hwLat, llMaxBws, perChMaxRingLL128Bws); efficiencies of NVLS: nvlsEfficiency
there; of networks: .9, as the plateaus of published runs; the rest: orders of size.
"""

from __future__ import annotations

from dataclasses import dataclass

_HOP_NS = {"switch": 3000.0, "mesh": 4000.0, "network": 14_000.0, "efa": 50_000.0}
_LAUNCH_NS = {"switch": 10_000.0, "mesh": 60_000.0}
_RATE = {"switch": 0.78, "mesh": 0.7, "network": 0.9, "efa": 0.9}
_RATES = {("switch", "nvls"): 0.58, ("network", "all_to_all"): 0.8, ("efa", "all_to_all"): 0.8}

_LIBRARY = {
    "drain": (0.35, 0.5),
    "exchange": (10.0, 0.5),
    "nvls hop": (4.0, 0.3),
    "ll hop": (0.35, 0.3),
    "ll128 hop": (0.5, 0.3),
    "ll network_hop": (0.3, 0.3),
    "ll128 network_hop": (0.5, 0.3),
    "ll rate": (0.3, 0.15),
    "ll128 rate": (0.75, 0.15),
    "ll network_rate": (0.4, 0.15),
    "ll128 network_rate": (0.8, 0.15),
    "fill ring ll": (0.5, 0.7),
    "fill ring ll128": (0.5, 0.7),
    "fill ring simple": (0.5, 0.7),
    "fill tree": (1.5, 0.5),
    "fill nvls": (1.5, 0.5),
    "fill nvls_tree": (1.0, 0.5),
    "fill all_to_all": (8.0, 0.5),
    "fill send": (0.5, 0.5),
}
"""Value and spread of its logarithm, by the constant's name after the library's."""

FILLS = tuple(name.removeprefix("fill ") for name in _LIBRARY if name.startswith("fill "))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """A mean, how far its logarithm (of a rate: its odds') strays, and that of one of the kind.

    `mean` names the kind; `is_share` says that the constant lies between 0 and 1.
    """

    mean: str
    value: float
    spread: float
    deviation: float
    is_share: bool = False


def link_kind(family: str) -> str:
    """What a family of links is built like."""
    if family.startswith(("nvswitch", "nvlink")):
        return "switch"
    if family.startswith("infinity"):
        return "mesh"
    return "efa" if family == "efa" else "network"


def prior_of(name: str) -> Prior:
    """The prior of a constant by its name, as `collective_terms` gives it."""
    first, _, rest = name.partition(" ")
    if first == "hop":
        kind = link_kind(rest)
        # NCCL measured its table's hops over InfiniBand; nobody did for the others.
        spread, deviation = (0.2, 0.2) if kind == "network" else (0.5, 0.4)
        return Prior(mean=f"hop {kind}", value=_HOP_NS[kind], spread=spread, deviation=deviation)
    if first == "launch":
        kind = link_kind(rest)
        value = _LAUNCH_NS.get(kind, _LAUNCH_NS["switch"])
        return Prior(mean=f"launch {kind}", value=value, spread=0.5, deviation=0.4)
    if first == "rate":
        family, _, what = rest.partition(" ")
        kind = link_kind(family)
        value = _RATES.get((kind, what), _RATE[kind])
        return _share(f"rate {kind} {what}", value, 0.3, 0.25)
    if rest == "piece":
        # Only RCCL's rows show it: the framework hands over lists of buffers there.
        value, spread = (20_000.0, 1.5) if first == "rccl" else (1.0, 0.01)
        return Prior(mean=name, value=value, spread=spread, deviation=0.01)
    return _of_library(first, rest)


def _of_library(library: str, rest: str) -> Prior:
    """RCCL is a port of NCCL: its constants stray from NCCL's, which most rows show."""
    value, spread = _LIBRARY[rest]
    deviation = 0.02 if library == "nccl" else 0.3
    if rest.endswith("rate"):
        return _share(rest, value, spread, deviation)
    return Prior(mean=rest, value=value, spread=spread, deviation=deviation)


def _share(mean: str, value: float, spread: float, deviation: float) -> Prior:
    # A spread of the odds' logarithm that moves the share by the given part of it.
    spread /= 1 - min(0.9, value)
    return Prior(mean=mean, value=value, spread=spread, deviation=deviation, is_share=True)
