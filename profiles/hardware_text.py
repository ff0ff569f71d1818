"""What people write about hardware, in free text, to a `Cluster` of the catalogue.

Published results name their GPU, the link inside a node and the network between nodes in words:
'A100-80GB', 'NVLink (NVL72 domain)', '8x ConnectX-7 400Gb/s, Management: 100Gb/s Ethernet'. The
readers of published files ask here; what a text leaves open is taken from what the GPU is usually
delivered with, and said in the answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from claw_plan.profiles import catalogue, network_text
from claw_plan.profiles.cluster import Cluster
from claw_plan.profiles.cluster_file import cluster_from_mapping
from claw_plan.profiles.errors import InputError

_GPUS = (
    (r"gb300", "gb300-288gb"),
    (r"b300", "b300-sxm-288gb"),
    (r"gb200", "gb200-186gb"),
    (r"b200", "b200-sxm-180gb"),
    (r"gh200", "gh200-96gb"),
    (r"h200", "h200-sxm-141gb"),
    (r"h800", "h800-sxm-80gb"),
    (r"h20\b", "h20-96gb"),
    (r"h100.*(500 ?w|96 ?gb|hbm2e)", "h100-96gb-hbm2e-500w"),
    (r"h100.*(nvl\b|94 ?gb)", "h100-nvl-94gb"),
    (r"h100.*pcie", "h100-pcie-80gb"),
    (r"h100", "h100-sxm-80gb"),
    (r"a800", "a800-sxm-80gb"),
    (r"a100.*pcie.*40 ?g|a100.*40 ?g.*pcie", "a100-pcie-40gb"),
    (r"a100.*pcie", "a100-pcie-80gb"),
    (r"a100.*40 ?g|40 ?gi?b? a100|p4d\b", "a100-sxm-40gb"),
    (r"a100|p4de\b", "a100-sxm-80gb"),
    (r"v100.*pcie|pcie.*v100", "v100-pcie-32gb"),
    (r"v100.*32 ?g|32 ?g.*v100", "v100-sxm-32gb"),
    (r"v100", "v100-sxm-16gb"),
    (r"p100.*pcie", "p100-pcie-16gb"),
    (r"p100", "p100-sxm-16gb"),
    (r"mi355", "mi355x"),
    (r"mi350", "mi350x"),
    (r"mi325", "mi325x"),
    (r"mi300a", "mi300a"),
    (r"mi300", "mi300x"),
    (r"mi250x", "mi250x-gcd"),
    (r"mi210", "mi210"),
    (r"mi250|mi2\d\d", "mi250-gcd"),
    (r"mi100", "mi100"),
    (r"a10g", "a10g"),
    (r"a6000", "rtx-a6000"),
    (r"a40\b", "a40"),
    (r"a30\b", "a30"),
    (r"a10\b", "a10"),
    (r"l40s", "l40s"),
    (r"l40\b", "l40"),
    (r"l4\b", "l4"),
    (r"t4\b", "t4"),
    (r"6000 ada", "rtx-6000-ada"),
    (r"5090", "rtx-5090"),
    (r"4090", "rtx-4090"),
    (r"3090", "rtx-3090"),
)
"""Patterns of names, the more particular first; the catalogue spells each the one way."""

_SXM_LINKS = {
    "v100": "nvlink2-mesh",
    "p100": "nvlink2-mesh",
    "a100": "nvswitch3",
    "a800": "nvswitch3-a800",
    "h800": "nvswitch4-h800",
    "h100": "nvswitch4",
    "h200": "nvswitch4",
    "h20": "nvswitch4",
    "gh200": "nvswitch4",
    "b200": "nvswitch5",
    "gb200": "nvswitch5-nvl72",
    "b300": "nvswitch5",
    "gb300": "nvswitch5-nvl72",
    "mi100": "infinity-fabric-mi100",
    "mi210": "infinity-fabric-mi100",
    "mi250": "infinity-fabric-mi250",
    "mi250x": "infinity-fabric-mi250",
    "mi300a": "infinity-fabric-mi300x",
    "mi300x": "infinity-fabric-mi300x",
    "mi325x": "infinity-fabric-mi300x",
    "mi350x": "infinity-fabric-mi355x",
    "mi355x": "infinity-fabric-mi355x",
}
"""The link among the GPUs of a node, by the first word of the device's name."""

_PCIE_LINKS = {"v100": "pcie3-x16", "p100": "pcie3-x16", "t4": "pcie3-x16", "mi100": "pcie4-x16"}
_PCIE_LINKS |= {"h100": "pcie5-x16"}

_NIC_GB_PER_S = {"v100": 12.5, "p100": 12.5, "t4": 1.6, "a800": 25.0, "a100": 25.0}
_NIC_GB_PER_S |= {"b300": 100.0, "gb300": 100.0, "mi250": 25.0, "mi250x": 25.0, "mi100": 25.0}
_NIC_GB_PER_S |= {"a10": 1.6, "a10g": 1.6, "l4": 1.6, "l40": 12.5, "l40s": 12.5, "a40": 12.5}
_OTHER_NIC_GB_PER_S = 50.0
"""Network rate per GPU in GB/s where a source prints none: 8 x 200 Gb/s per A100 node, 8 x 400
per H100, B200 or MI300X node, 8 x 800 per B300 node, as the makers deliver them; a cloud's
100 Gb/s per node of eight small GPUs."""

NVLINK_DOMAIN = {"gb200": 72, "gb300": 72}
"""GPUs that one NVLink network joins across trays (NVIDIA GB200 and GB300 NVL72 pages)."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A cluster as read, with sentences about what its text left open."""

    cluster: Cluster
    device_name: str
    assumed: tuple[str, ...]


def device_of(gpu: str) -> tuple[str, str]:
    """The catalogue's name for a GPU in words, and what had to be assumed of it ('' if nothing).

    Raises InputError for a GPU the catalogue does not hold.
    """
    text = re.sub(r"[\s_\-]+", " ", gpu.lower())
    for pattern, name in _GPUS:
        if re.search(rf"(?<![a-z0-9])(?:\d+x|nvidia|tesla|rtx)?(?:{pattern})", text):
            return name, _memory_assumed(text, name)
    raise InputError(f"no figures for the GPU {gpu!r}; the catalogue of devices does not hold it")


def _memory_assumed(text: str, name: str) -> str:
    is_open = name.startswith(("a100", "v100")) and not re.search(r"\d+ ?g(i?b)?\b|p4", text)
    return f"memory size of the GPU not stated: {name}" if is_open else ""


@lru_cache(maxsize=1024)
def hardware_of(
    gpu: str,
    count: int,
    gpus_per_node: int,
    intra: str = "",
    inter: str = "",
    *,
    joined: bool = True,
) -> Hardware:
    """The cluster that the words of a published result mean.

    Args:
        gpu: Name of the GPU.
        count: GPUs of the run.
        gpus_per_node: GPUs of a host, as printed.
        intra: The link inside a host; '' when not printed.
        inter: The network between hosts; '' when not printed.
        joined: Whether hosts that NVLink can join are joined by it.

    Raises:
        InputError: The GPU is not in the catalogue, or a count is not positive.
    """
    if count < 1 or gpus_per_node < 1:
        raise InputError(f"a run has GPUs: {count} of {gpus_per_node} a node")
    name, memory_note = device_of(gpu)
    kind = name.partition("-")[0]
    assumed = [memory_note] if memory_note else []
    reach = (_domain(kind, intra) if joined else 0) or gpus_per_node
    size, size_note = _node_size(reach, count, gpus_per_node)
    assumed += [size_note] if size_note else []
    link, link_note = _intra_link(name, kind, intra)
    if size > 1 and link_note:
        assumed.append(link_note)
    nics: dict[str, Any] = {"type": "ethernet-10"}
    if count > size:
        usual = _NIC_GB_PER_S.get(kind, _OTHER_NIC_GB_PER_S)
        nics, nic_note = network_text.nics_of(inter, size, gpus_per_node, usual)
        assumed += [nic_note] if nic_note else []
    node = {
        "count": count // size,
        "devices": {"type": name, "count": size},
        "intra": {"type": link},
        "nics": nics,
        "host": {"memory": f"{_host_gib(name) * size} GiB", "cores": 8 * size},
    }
    cluster = cluster_from_mapping({"name": f"{count}x{name}", "nodes": [node]}, "hardware")
    return Hardware(cluster=cluster, device_name=name, assumed=tuple(assumed))


def _host_gib(name: str) -> int:
    """Host memory per GPU: twice the GPU's own, as hosts are commonly built."""
    return max(64, 2 * catalogue.device(name).memory_bytes >> 30)


def _node_size(reach: int, count: int, gpus_per_node: int) -> tuple[int, str]:
    """GPUs that the fast link joins, and a sentence where fewer of them are used."""
    if count <= reach:
        return count, ""
    step = gpus_per_node if reach > gpus_per_node and count % gpus_per_node == 0 else 1
    size = max(n for n in range(step, reach + 1, step) if count % n == 0)
    if size == reach:
        return size, ""
    return size, f"{count} GPUs in nodes of up to {reach}: {size} of each are used"


def _domain(kind: str, intra: str) -> int:
    printed = re.search(r"nvl ?(\d{2,3})", intra.lower())
    return int(printed[1]) if printed else NVLINK_DOMAIN.get(kind, 0)


def _intra_link(name: str, kind: str, intra: str) -> tuple[str, str]:
    """The catalogue's link inside a node, and a sentence where the text does not name it."""
    text = intra.lower()
    if "bridge" in text:  # joins pairs only: across the node traffic goes over PCIe
        text = "pcie"
    pcie = re.search(r"pci ?-?e(?:xpress)?(?: gen)?[ -]?([345])?", text)
    has_fabric = "nvl" in text or "nvswitch" in text or "fabric" in text or "xgmi" in text
    if pcie and not has_fabric:
        printed = f"pcie{pcie[1]}-x16" if pcie[1] else ""
        return printed or _PCIE_LINKS.get(kind, "pcie4-x16"), ""
    if has_fabric and kind in _SXM_LINKS:
        return _SXM_LINKS[kind], ""
    is_pcie = "-pcie" in name or kind not in _SXM_LINKS
    link = _PCIE_LINKS.get(kind, "pcie4-x16") if is_pcie else _SXM_LINKS[kind]
    return link, f"link inside a node not printed: {link}"
