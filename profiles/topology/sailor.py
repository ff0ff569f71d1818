"""Sailor's network profiles (multizone_bandwidths*.json) to a `Reading`.

They nest zone, GPU type and GPUs of a machine twice: from where, to where. What stands inside are
coefficients of Sailor's own fit of time over size, no rates, so none is taken for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from claw_plan.profiles.device_names import catalogue_name
from claw_plan.profiles.files import Document
from claw_plan.profiles.topology.reading import MAX_GPUS, Reading
from claw_plan.profiles.topology.source import Source, whole_number

FORMAT = "Sailor network profile"


def _kinds(data: Any) -> list[tuple[str, str, str]] | None:
    """Zone, GPU type and GPUs of every machine named; None when the nesting is another."""
    found = []
    for zone, by_gpu in data.items() if isinstance(data, Mapping) else ():
        for gpu, by_count in by_gpu.items() if isinstance(by_gpu, Mapping) else ():
            for count, inside in by_count.items() if isinstance(by_count, Mapping) else ():
                if not isinstance(inside, Mapping) or not whole_number(str(count), MAX_GPUS):
                    return None
                found.append((str(zone), str(gpu), str(count)))
    return found or None


def recognise(document: Document) -> bool:
    """Whether two nestings of zone, GPU and count follow each other."""
    kinds = _kinds(document.data)
    if kinds is None:
        return False
    zone, gpu, count = kinds[0]
    inside: Any = next((d for key, d in document.data[zone][gpu].items() if str(key) == count), {})
    return _inner(inside)


def _inner(data: Any) -> bool:
    levels: Any = data
    for _ in range(3):
        if not isinstance(levels, Mapping) or not levels:
            return False
        levels = next(iter(levels.values()))
    return isinstance(levels, list)


def read(source: Source, document: Document) -> list[Reading]:
    """One Reading: the machines that are named; no rate."""
    kinds = _kinds(document.data) or []
    zones = list(dict.fromkeys(zone for zone, _, _ in kinds))
    machines = list(dict.fromkeys((gpu, count) for _, gpu, count in kinds))
    counts = {int(count) for _, count in machines}
    gpus = {gpu for gpu, _ in machines}
    single = counts.pop() if len(counts) == 1 else None
    types = (next(iter(gpus)),) * single if single and len(gpus) == 1 else ()
    strange = [gpu for gpu in sorted(gpus) if catalogue_name(gpu) is None]
    unknown = ["rates of links: the file holds Sailor's fitted coefficients", "NICs"]
    unknown += [f"figures of {', '.join(strange[:8])}"] if strange else []
    return [
        Reading(
            source=source.name,
            format=FORMAT,
            gpu_count=single,
            gpu_types=types,
            facts=(
                f"zones: {', '.join(zones[:12])}",
                "machines: " + ", ".join(f"{count} x {gpu}" for gpu, count in machines[:12]),
            ),
            unknown=tuple(unknown),
        )
    ]
