"""What people write about a cluster's network, in free text, to the NICs of a node.

'Storage: 2x 400Gb/s, Compute: 8x ConnectX-7 IB NDR 400Gb/s, Management: 100Gb/s Ethernet' has
eight NICs that carry training. `hardware_text` puts the answer into a cluster's nodes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_RATE = re.compile(
    r"(?:(\d+)\s*x\s*(?:[a-z][\w\-+]*\s+(?:[a-z][\w\-]*\s+)*?)?\(?)?"
    r"(\d+(?:\.\d+)?)\s*([gt])(?:(bit|b|B)?\s*(?:/\s*s(?:ec)?|ps)|(be)\b)",
    re.IGNORECASE,
)
_PORTS = re.compile(r"(\d+)\s+(?:\w+\s+)?(?:nics|ports|hcas|adapters)\b", re.IGNORECASE)
_SPEEDS = {"xdr": 800.0, "ndr200": 200.0, "ndr": 400.0, "hdr100": 100.0, "hdr": 200.0}
_SPEEDS |= {"edr": 100.0, "fdr": 56.0}
"""Gb/s of InfiniBand's generations, as in the association's roadmap."""

_OTHER_TRAFFIC = re.compile(r"storage|management|front-?end|pcie|gpu-pcie|bmc", re.IGNORECASE)
_TCP_EFFICIENCY = 0.85
"""The share of an Ethernet NIC's rate that TCP reaches, as in the catalogue; what collectives
reach over other NICs is known of their kind."""


@dataclass(frozen=True, slots=True)
class _Printed:
    """`count` NICs of `gbit_per_s` each; a count of 0 is not printed."""

    count: int
    gbit_per_s: float
    scope: str

    @property
    def total(self) -> float:
        return max(1, self.count) * self.gbit_per_s


def nics_of(
    inter: str, size: int, gpus_per_node: int, usual_gb_per_s: float
) -> tuple[dict[str, Any], str]:
    """The `nics:` of a node of `size` GPUs, and a sentence where the text gives no rate.

    Args:
        inter: The text; '' when the source prints none.
        size: GPUs of the node made of it (an NVLink domain may join several hosts).
        gpus_per_node: GPUs of one host: what 'per node' speaks of.
        usual_gb_per_s: Rate per GPU to take where the text gives none.
    """
    parts = _training_parts(inter)
    printed = _best(parts, inter)
    kind = _kind(" ".join(parts))
    if printed is None:
        gbit, note = 8 * usual_gb_per_s, f"network not printed: {usual_gb_per_s:g} GB/s per GPU"
        if inter:
            note = f"rate of the network not printed ({inter}): {usual_gb_per_s:g} GB/s per GPU"
        return _of_gpus(kind, gbit, size), note
    if printed.scope == "gpu":
        return _of_gpus(kind, printed.gbit_per_s, size), ""
    count, gbit = _split(printed, gpus_per_node)
    hosts = size / gpus_per_node
    if hosts >= 1:
        return _nics(kind, round(count * hosts), gbit), ""
    return _nics(kind, 1, count * gbit * hosts), ""


def _of_gpus(kind: str, gbit_per_s: float, size: int) -> dict[str, Any]:
    """A NIC for each GPU, or one for all where a GPU's share is no port's rate."""
    if gbit_per_s >= 100 or size == 1:
        return _nics(kind, size, gbit_per_s)
    return _nics(kind, 1, gbit_per_s * size)


def _split(printed: _Printed, gpus_per_node: int) -> tuple[int, float]:
    """A host's NICs: as printed, or as many of at least 100 Gb/s as it has GPUs."""
    if printed.count:
        return printed.count, printed.gbit_per_s
    count = max(1, min(gpus_per_node, int(printed.gbit_per_s // 100)))
    return count, printed.gbit_per_s / count


def _training_parts(inter: str) -> list[str]:
    """The parts of the text that speak of the network for training."""
    parts = [part for part in re.split(r"[,;=]", inter) if part.strip()]
    compute = [part for part in parts if re.search(r"comput", part, re.IGNORECASE)]
    return compute or [part for part in parts if not _OTHER_TRAFFIC.search(part)]


def _best(parts: list[str], whole: str) -> _Printed | None:
    found = [one for part in parts if (one := _rate_of(part, whole)) is not None]
    return max(found, key=lambda one: one.total, default=None)


def _rate_of(part: str, whole: str) -> _Printed | None:
    scope = "gpu" if re.search(r"(per|/) ?(gpu|accelerator)", whole, re.IGNORECASE) else "node"
    match = _RATE.search(part)
    if match is not None:
        count, number, prefix, unit, ethernet = match.groups()
        # '100GbE InfiniBand' names the hosts' Ethernet beside an InfiniBand without a rate.
        if ethernet and "infiniband" in part.lower():
            return None
        gbit = float(number) * (1000 if prefix.lower() == "t" else 1)
        is_bytes = unit == "B"
        ports = _PORTS.search(part)
        count = count or (ports[1] if ports else 0)
        return _Printed(int(count), gbit * (8 if is_bytes else 1), scope)
    count_match = re.search(r"(\d+)\s*x\b", part, re.IGNORECASE) or _PORTS.search(part)
    for name, gbit in _SPEEDS.items():
        if re.search(rf"\b{name}\d{{0,3}}\b", part, re.IGNORECASE):
            count = int(count_match[1]) if count_match else 0
            return _Printed(count, gbit, "node" if count else "gpu")
    return None


def _kind(inter: str) -> str:
    """The catalogue's link whose latency it has: 'ib', 'roce', 'efa' or 'ethernet'."""
    text = inter.lower()
    if "efa" in text:
        return "efa"
    if "roce" in text or "rdma" in text:
        return "roce"
    if "ethernet" in text and "infiniband" not in text and "ib " not in text:
        return "ethernet"
    return "ib"


_BASES = {"ib": "ib-ndr", "roce": "roce-400", "efa": "efa-100", "ethernet": "ethernet-100"}


def _nics(kind: str, count: int, gbit_per_s: float) -> dict[str, Any]:
    gb_per_s = gbit_per_s / 8
    nics: dict[str, Any] = {
        "type": _BASES[kind],
        "name": f"{kind}-{gbit_per_s:g}",
        "count": count,
        "bandwidth": f"{gb_per_s:g} GB/s",
    }
    if kind == "ethernet":
        nics["achieved"] = {"other": f"{_TCP_EFFICIENCY * gb_per_s:g} GB/s"}
    return nics
