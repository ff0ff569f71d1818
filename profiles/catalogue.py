"""Names of devices, links and node types to their figures.

`catalogue.yaml` holds the figures with their sources; a cluster file names them, overrides some,
or spells out its own. What comes out are the `Device`s and `Link`s of a `Cluster`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TypeVar

from claw_plan.profiles.cluster import Device, Link
from claw_plan.profiles.cluster_schema import (
    CatalogueSpec,
    DeviceFigures,
    LinkFigures,
    NodeSpec,
    Part,
    given,
)
from claw_plan.profiles.collective_constants import link_constants, provenance
from claw_plan.profiles.errors import InputError, near_matches
from claw_plan.profiles.files import read_yaml, validate
from claw_plan.profiles.fitted import fitted
from claw_plan.profiles.rates import RATES, usual_rates

KERNEL_LAUNCH_NS = 15_000
"""Host time per kernel of eager PyTorch on a GPU: the default of a fit to 426 published training
steps (MosaicML, Megatron-Core, torchtitan and others); Megatron-Core alone gives 14 us."""

ALIASES = {"cpu": "cpu-core", "v100": "v100-sxm-16gb", "h200": "h200-sxm-141gb"}
ALIASES |= {"h100": "h100-sxm-80gb", "b200": "b200-sxm-180gb", "gb200": "gb200-186gb"}
ALIASES |= {"a100-40gb": "a100-sxm-40gb", "a100-80gb": "a100-sxm-80gb", "rtx4090": "rtx-4090"}

_BONDED = re.compile(r"(.+?)\s+x(\d{1,3})\Z")
_Figures = TypeVar("_Figures", bound=Part)


@cache
def catalogue() -> CatalogueSpec:
    """The catalogue file, read once."""
    return validate(read_yaml(Path(__file__).with_name("catalogue.yaml")), CatalogueSpec)


def device_names() -> list[str]:
    """All devices that a cluster file may name."""
    return sorted([*catalogue().devices, *ALIASES])


def like_of(name: str) -> str:
    """The part a device's figures are taken from where it has none of its own; '' without."""
    entry = catalogue().devices.get(ALIASES.get(name, name))
    return (entry.like or "") if entry is not None else ""


def node_type(name: str) -> NodeSpec:
    """A node type; raises InputError that names near matches."""
    nodes = catalogue().nodes
    if name not in nodes:
        raise InputError(f"unknown node type {name!r}; " + near_matches(name, [*nodes, "cpu"]))
    return nodes[name]


def _resolve(name: str, entries: Mapping[str, _Figures]) -> _Figures:
    """An entry with what it takes over from the one it is `like`."""
    entry = entries[name]
    like = getattr(entry, "like", None)
    if like is None:
        return entry
    base = _resolve(like, entries)
    return base.model_copy(update=given(entry))


def device(name: str, own: DeviceFigures | None = None, *, with_fitted: bool = True) -> Device:
    """A device of the catalogue, `own` figures taken first; 'custom' has only its own.

    `with_fitted=False` leaves out what published training runs tell of its rates.
    """
    if name == "custom":
        figures = own or DeviceFigures()
        _require(figures, "memory", "bandwidth", "peak")
    else:
        known = ALIASES.get(name, name)
        if known not in catalogue().devices:
            choices = [*device_names(), "custom"]
            raise InputError(f"unknown device {name!r}; " + near_matches(name, choices))
        name = known
        figures = _resolve(known, catalogue().devices)
        if own is not None:
            figures = figures.model_copy(update=_overrides(figures, own))
    assert figures.memory and figures.bandwidth and figures.peak
    peak: dict[str, float] = {str(dtype): rate for dtype, rate in figures.peak.items()}
    sources = [figures.source or "given in the cluster file"]
    if figures.achieved:
        sources.append("sustained: " + (figures.achieved_source or "given in the cluster file"))
    return Device(
        name=name,
        kind=figures.kind or "cuda",
        memory_bytes=figures.memory,
        memory_bytes_per_s=figures.bandwidth,
        peak_flops_per_s=peak,
        achieved_flops_per_s=_sustained(name, figures, own, with_fitted=with_fitted),
        kernel_launch_ns=figures.kernel_launch or KERNEL_LAUNCH_NS,
        source="; ".join(sources),
        processors=figures.processors or 0,
        gemm_ramp=figures.gemm_ramp or 0,
        peer_to_peer=figures.peer_to_peer is not False,
    )


def _overrides(known: DeviceFigures, own: DeviceFigures) -> dict[str, object]:
    """The file's own figures; a new peak without a new sustained rate drops the old one."""
    changes = {key: value for key, value in given(own).items() if hasattr(known, key)}
    if "peak" in changes and "achieved" not in changes:
        changes |= {"achieved": None, "achieved_source": None}
    if changes and not {"source"} & set(changes):
        changes["source"] = f"{known.source}; {', '.join(sorted(changes))} from the cluster file"
    return changes


def _require(figures: Part, *names: str) -> None:
    missing = [name for name in names if getattr(figures, name) is None]
    if missing:
        raise InputError(f"a custom type needs {', '.join(names)}; missing: {', '.join(missing)}")


def _sustained(
    name: str, figures: DeviceFigures, own: DeviceFigures | None, *, with_fitted: bool
) -> dict[str, float]:
    """The cluster file's rates, else fitted ones, else measured ones, else what is usual."""
    assert figures.peak
    peak = {str(dtype): rate for dtype, rate in figures.peak.items()}
    rates = usual_rates(peak, figures.power_w)
    rates |= {str(key): rate for key, rate in (figures.achieved or {}).items()}
    if own is not None and (own.peak or own.achieved):
        return rates
    for rate, factor in (_fitted_factors(name) if with_fitted else {}).items():
        for dtype in RATES[rate]:
            if dtype in rates:
                rates[dtype] = min(factor * rates[dtype], peak.get(dtype, math.inf))
    return rates


@cache
def _fitted_factors(name: str) -> Mapping[str, float]:
    """Fitted rates over those without the fit: of the part, else of the one it is like."""
    known, like = fitted().rates.get(name), like_of(name)
    inherited = dict(_fitted_factors(like)) if like else {}
    if known is None:
        return inherited
    plain = device(name, with_fitted=False).achieved_flops_per_s
    return inherited | {
        rate: value / plain[RATES[rate][-1]]
        for rate, value in known.items()
        if RATES[rate][-1] in plain
    }


def link(name: str | None, own: LinkFigures | None = None) -> Link:
    """A link of the catalogue ('nvlink3 x4' is four side by side), `own` figures first.

    Without a name the link is spelled out: `own` has bandwidth and latency.
    """
    own = own or LinkFigures()
    changes = {key: value for key, value in given(own).items() if key in LinkFigures.model_fields}
    if name is None:
        _require(own, "bandwidth", "latency")
        return _link(getattr(own, "name", None) or "custom", own, 1)
    bonded = _BONDED.match(name)
    base, count = (bonded[1], int(bonded[2])) if bonded else (name, 1)
    links = catalogue().links
    if base not in links or count == 0:
        raise InputError(f"unknown link {name!r}; " + near_matches(base, links))
    figures = _resolve(base, links)
    own_names = set(changes)
    if "bandwidth" in changes and "achieved" not in changes:
        changes |= {"achieved": None, "achieved_source": None}
    figures = _fitted(base, figures.model_copy(update=changes), own_names)
    return _link(getattr(own, "name", None) or name, figures, count)


def _fitted(name: str, figures: LinkFigures, own: set[str]) -> LinkFigures:
    """The figures with what `collective_constants` knows of the link, after the file's own."""
    constants = link_constants(name)
    like = catalogue().links[name].like
    while constants is None and like is not None:
        constants, like = link_constants(like), catalogue().links[like].like
    if constants is None:
        return figures
    assert figures.bandwidth
    rates = {op: share * figures.bandwidth for op, share in constants.share.items()}
    known: dict[str, object] = {"latency": constants.hop_ns, "launch": constants.launch_ns}
    known |= {"achieved": rates, "achieved_source": f"fitted to {provenance()}"}
    return figures.model_copy(update={key: known[key] for key in known if key not in own})


def _link(name: str, figures: LinkFigures, count: int) -> Link:
    assert figures.bandwidth and figures.latency
    sources = [figures.source or "given in the cluster file"]
    if figures.achieved:
        sources.append("achieved: " + (figures.achieved_source or "given in the cluster file"))
    return Link(
        name=name,
        bytes_per_s=figures.bandwidth * count,
        latency_ns=figures.latency,
        source="; ".join(sources),
        achieved_bytes_per_s={
            str(op): rate * count for op, rate in (figures.achieved or {}).items()
        },
        startup_ns={str(op): time for op, time in (figures.startup or {}).items()},
        launch_ns=figures.launch,
        nvls=bool(figures.nvls),
        peer_links=figures.peer_links or 0,
        group_share=figures.group_share or {},
    )
