"""Calculon's system files (JSON) to a `Reading` with a draft of the node.

Units are Calculon's: GiB of memory, GBps = 1e9 bytes/s, tflops, latency in seconds. The first
network is the node's; the second is what its GPUs reach other nodes by.
"""

from __future__ import annotations

from typing import Any

from claw_plan.profiles.cluster_schema import MAX_DEVICE_BYTES
from claw_plan.profiles.errors import InputError
from claw_plan.profiles.files import Document
from claw_plan.profiles.topology.reading import MAX_GPUS, Reading
from claw_plan.profiles.topology.source import Source
from claw_plan.profiles.topology.structured import number, whole
from claw_plan.profiles.units import GIB

FORMAT = "Calculon system"

_DTYPES = {"float8": "float8", "float16": "float16", "bfloat16": "bfloat16", "float32": "float32"}
_MAX_TFLOPS, _MAX_GB_S, _MAX_LATENCY_S = 1e6, 1e6, 1.0
_MAX_TIER = 10_000_000


def recognise(document: Document) -> bool:
    """Whether it has Calculon's memories and networks."""
    return {"matrix", "mem1", "networks"} <= set(document.data)


def read(source: Source, document: Document) -> list[Reading]:
    """One Reading. Raises InputError with the line of an implausible figure."""
    matrix, networks = document.data["matrix"], document.data["networks"]
    if not isinstance(matrix, dict) or not isinstance(networks, list) or not networks:
        raise InputError(f"{document.where(['networks'])}: must be a list with a network")
    memory_gib = number(document, "mem1", "GiB", limit=MAX_DEVICE_BYTES / GIB)
    peak = {
        _DTYPES[name]: f"{number(document, 'matrix', name, 'tflops', limit=_MAX_TFLOPS):g} TFLOPS"
        for name in matrix
        if name in _DTYPES
    }
    if not peak:
        raise InputError(f"{document.where(['matrix'])}: has none of {', '.join(_DTYPES)}")
    tiers = [_tier(document, index) for index in range(min(len(networks), 4))]
    count = whole(document, "networks", 0, "size", limit=_MAX_TIER)
    if count > MAX_GPUS:
        raise InputError(
            f"{document.where(['networks', 0, 'size'])}: {count} GPUs are not one node"
        )
    origin = f"given in {source.name} (Calculon)"
    draft: dict[str, Any] = {
        "devices": {
            "type": "custom",
            "name": source.name.removesuffix(".json"),
            "count": count,
            "memory": f"{memory_gib:g} GiB",
            "bandwidth": f"{number(document, 'mem1', 'GBps', limit=_MAX_GB_S):g} GB/s",
            "peak": peak,
            "source": origin,
        },
        "intra": tiers[0] | {"source": origin},
    }
    if len(tiers) > 1:
        draft["nics"] = tiers[1] | {"count": count, "source": origin}
    rates = ", ".join(f"{dtype} {rate}" for dtype, rate in peak.items())
    facts = [f"GPU: {memory_gib:g} GiB, {draft['devices']['bandwidth']}, {rates}"]
    facts += [f"network {index}: {tier['bandwidth']}" for index, tier in enumerate(tiers)]
    return [
        Reading(
            source=source.name,
            format=FORMAT,
            gpu_count=count,
            gpu_types=(draft["devices"]["name"],) * count,
            facts=(*facts, "units assumed: GiB = 2^30 bytes, GBps = 1e9 bytes/s"),
            unknown=("the number of nodes", "NICs: Calculon gives each GPU its own port"),
            warnings=("figures of a simulator's input, not measured",),
            draft=draft,
        )
    ]


def _tier(document: Document, index: int) -> dict[str, Any]:
    bandwidth = number(document, "networks", index, "bandwidth", limit=_MAX_GB_S)
    latency = number(document, "networks", index, "latency", limit=_MAX_LATENCY_S)
    return {"bandwidth": f"{bandwidth:g} GB/s", "latency": f"{max(1, round(latency * 1e9))} ns"}
