"""ASTRA-sim's network and system files to a `Reading`.

Analytical networks (.yml), the logical dimensions of ns-3 and htsim's .topo name links and sizes;
a system file (.json) names collective algorithms and no topology. GB/s is taken as 1e9 bytes/s
although ASTRA-sim's own engine multiplies by 2^30.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.files import Document
from claw_plan.profiles.topology.reading import MAX_GPUS, Reading
from claw_plan.profiles.topology.source import Source, real_number, whole_number
from claw_plan.profiles.topology.structured import number, numbers, whole

FORMAT = "ASTRA-sim network"
_UNIT = "unit assumed: GB/s = 1e9 bytes/s (ASTRA-sim's engine takes 2^30)"
_MAX_NPUS, _MAX_GB_S, _MAX_NS = 1e7, 1e5, 1e9
_HTSIM = re.compile(r"\s*(Nodes|Tiers|Podsize)\s+(\S{1,20})\s*\Z")
_HTSIM_LATENCY = re.compile(r"\s*Downlink_Latency_ns\s+(\S{1,20})\s*\Z")
_LEAST_NS = 100.0
"""No network of devices is faster end to end; less is microseconds taken for nanoseconds."""
_HTSIM_SPEED = re.compile(r"\s*Downlink_speed_Gbps\s+(\S{1,20})\s*\Z")


def recognise(document: Document) -> bool:
    """Whether it is one of ASTRA-sim's files with keys."""
    keys = set(document.data)
    return (
        {"topology", "npus_count"} <= keys or "logical-dims" in keys or "scheduling-policy" in keys
    )


def recognise_htsim(source: Source) -> bool:
    """Whether it is a .topo of htsim."""
    names = {match[1] for line in source.lines[:50] if (match := _HTSIM.match(line))}
    return {"Nodes", "Tiers"} <= names


def read(source: Source, document: Document) -> list[Reading]:
    """One Reading. Raises InputError with the line of a mistake."""
    if "topology" in document.data:
        return [_network(source, document)]
    if "logical-dims" in document.data:
        return [_logical(source, document)]
    return [_system(source, document)]


def _network(source: Source, document: Document) -> Reading:
    shapes = document.data["topology"]
    shapes = shapes if isinstance(shapes, list) else [shapes]
    sizes = [round(size) for size in numbers(document, "npus_count", _MAX_NPUS)]
    rates = numbers(document, "bandwidth", _MAX_GB_S)
    latencies = numbers(document, "latency", _MAX_NS)
    if not len(shapes) == len(sizes) == len(rates) == len(latencies):
        raise InputError(
            f"{document.where(['npus_count'])}: topology, npus_count, bandwidth and latency must "
            f"have one entry a dimension; got {len(shapes)}, {len(sizes)}, {len(rates)} and "
            f"{len(latencies)}"
        )
    origin = f"given in {source.name} (ASTRA-sim)"
    links: list[dict[str, Any]] = [
        {
            "bandwidth": f"{rate:g} GB/s",
            "latency": f"{max(1, round(latency))} ns",
            "source": origin,
        }
        for rate, latency in zip(rates, latencies, strict=True)
    ]
    draft = {"intra": links[0]}
    if len(links) > 1:
        draft["nics"] = links[-1]
    facts = [
        f"dimension {index}: {shape} of {size}, {rate:g} GB/s, {latency:g} ns"
        for index, (shape, size, rate, latency) in enumerate(
            zip(shapes, sizes, rates, latencies, strict=True)
        )
    ]
    short = [latency for latency in latencies if latency < _LEAST_NS]
    warnings = [
        f"{document.where(['latency'])}: {latency:g} ns is implausibly short; microseconds?"
        for latency in short
    ]
    return _sized(source, sizes, [*facts, _UNIT], draft, warnings)


def _sized(
    source: Source,
    sizes: list[int],
    facts: list[str],
    draft: dict[str, Any] | None,
    warnings: Sequence[str] = (),
) -> Reading:
    nodes = math.prod(sizes[1:])
    inner = sizes[0] <= MAX_GPUS
    return Reading(
        source=source.name,
        format=FORMAT,
        gpu_count=sizes[0] if inner else None,
        node_count=nodes if inner else None,
        facts=(f"{math.prod(sizes)} NPUs: {' x '.join(map(str, sizes))}", *facts),
        unknown=("the type of the devices", "NICs"),
        warnings=("figures of a simulator's input, not measured", *warnings),
        draft=draft if inner else None,
    )


def _logical(source: Source, document: Document) -> Reading:
    dims = document.data["logical-dims"]
    if not isinstance(dims, list) or not 0 < len(dims) <= 16:
        raise InputError(f"{document.where(['logical-dims'])}: must be a list of 1 to 16 numbers")
    sizes = [
        whole(document, "logical-dims", index, limit=int(_MAX_NPUS)) for index in range(len(dims))
    ]
    return _sized(source, sizes, ["only logical dimensions: no link, no rate"], None)


def _system(source: Source, document: Document) -> Reading:
    facts = ["scheduling and collective algorithms; no topology and no devices"]
    if "local-mem-bw" in document.data:
        rate = number(document, "local-mem-bw", limit=_MAX_GB_S)
        facts.append(f"memory of a device: {rate:g} GB/s")
    return Reading(
        source=source.name,
        format="ASTRA-sim system",
        facts=tuple(facts),
        unknown=("the number and type of devices", "links: give ASTRA-sim's network file too"),
    )


def read_htsim(source: Source) -> list[Reading]:
    """One Reading of a .topo file."""
    values: dict[str, int] = {}
    speeds: list[float] = []
    latencies: list[float] = []
    for line_number, line in enumerate(source.lines, start=1):
        where = source.where(line_number)
        if match := _HTSIM.match(line):
            found = whole_number(match[2], int(_MAX_NPUS))
            if not found:
                raise InputError(f"{where}: {match[1]} must be a number from 1; got {match[2]!r}")
            values[match[1]] = found
        elif match := _HTSIM_SPEED.match(line):
            speed = real_number(match[1])
            if not speed or speed / 8 > _MAX_GB_S:
                raise InputError(f"{where}: a speed in Gbps, above 0; got {match[1]!r}")
            speeds.append(speed)
        elif (match := _HTSIM_LATENCY.match(line)) and (latency := real_number(match[1])):
            latencies.append(latency)
    if len(speeds) != values["Tiers"]:
        raise InputError(
            f"{source.name}: Tiers is {values['Tiers']}, but {len(speeds)} Downlink_speed_Gbps"
        )
    facts = [
        f"tier {tier}: {speed:g} Gb/s = {speed / 8:g} GB/s" for tier, speed in enumerate(speeds)
    ]
    return [
        Reading(
            source=source.name,
            format="ASTRA-sim htsim topology",
            node_count=values["Nodes"],
            facts=(f"{values['Nodes']} nodes, pods of {values.get('Podsize', 0)}", *facts),
            unknown=("the devices of a node",),
            warnings=("figures of a simulator's input, not measured",),
            draft=_htsim_nics(source, speeds, latencies),
        )
    ]


def _htsim_nics(
    source: Source, speeds: Sequence[float], latencies: Sequence[float]
) -> dict[str, Any] | None:
    if not latencies:
        return None
    rate, latency = f"{speeds[0]:g} Gb/s", f"{max(1, round(latencies[0]))} ns"
    origin = f"given in {source.name} (htsim), tier 0"
    return {"nics": {"bandwidth": rate, "latency": latency, "source": origin}}
