"""Proteus' cluster files (JSON) to a `Reading` with a draft of the node.

Units are Proteus': gflops, memory in MB, bandwidths in GB/s.
"""

from __future__ import annotations

from claw_plan.profiles.files import Document
from claw_plan.profiles.topology.hostfile import MAX_HOSTS
from claw_plan.profiles.topology.reading import MAX_GPUS, Reading
from claw_plan.profiles.topology.source import Source
from claw_plan.profiles.topology.structured import number, whole

FORMAT = "Proteus cluster"

_KEYS = {"n_node", "n_gpu_per_node", "gpu_gflops", "gpu_memory", "gpu_memory_bw"}
_MAX_MB, _MAX_GB_S, _MAX_GFLOPS = 1_048_576.0, 1e5, 1e9
_CONSUMER_GB_S = {"1080": 484.0, "2080": 616.0, "3080": 912.0, "3090": 1008.0, "4090": 1008.0}
"""Memory bandwidth of the fastest GeForce of that number (NVIDIA's product pages)."""


def recognise(document: Document) -> bool:
    """Whether it has Proteus' keys."""
    return set(document.data) >= _KEYS


def read(source: Source, document: Document) -> list[Reading]:
    """One Reading. Raises InputError with the line of an implausible figure."""
    nodes = whole(document, "n_node", limit=MAX_HOSTS)
    count = whole(document, "n_gpu_per_node", limit=MAX_GPUS)
    gflops = number(document, "gpu_gflops", limit=_MAX_GFLOPS)
    memory = number(document, "gpu_memory", limit=_MAX_MB)
    bandwidth = number(document, "gpu_memory_bw", limit=_MAX_GB_S)
    origin = f"given in {source.name} (Proteus)"
    name = source.name.removesuffix(".json")
    draft = {
        "devices": {
            "type": "custom",
            "name": name,
            "count": count,
            "memory": f"{memory:g} MB",
            "bandwidth": f"{bandwidth:g} GB/s",
            "peak": {"float32": f"{gflops:g} GFLOPS"},
            "source": origin,
        }
    }
    facts = [
        f"{nodes} nodes of {count} GPUs, each {gflops:g} gflops, {memory:g} MB, {bandwidth:g} GB/s"
    ]
    for key, part in (("gpu_to_gpu", "intra"), ("inter_node", "nics")):
        if key in document.data:
            rate = number(document, key, limit=_MAX_GB_S)
            facts.append(f"{key}: {rate:g} GB/s")
            draft[part] = {"bandwidth": f"{rate:g} GB/s", "latency": "5 us", "source": origin}
            draft[part]["source"] = f"{origin}; latency assumed"
    warnings = ["figures of a simulator's input, not measured"]
    for number_of_card, fastest in _CONSUMER_GB_S.items():
        if number_of_card in source.name and bandwidth > 1.25 * fastest:
            warnings.append(
                f"{document.where(['gpu_memory_bw'])}: {bandwidth:g} GB/s is implausible for a "
                f"{number_of_card} (at most {fastest:g}): copied from another GPU's file?"
            )
    return [
        Reading(
            source=source.name,
            format=FORMAT,
            gpu_count=count,
            gpu_types=(name,) * count,
            node_count=nodes,
            facts=(*facts, "units assumed: MB = 1e6 bytes, GB/s = 1e9 bytes/s"),
            unknown=("NICs: only the rate between nodes is given", "the paths between GPUs"),
            warnings=tuple(warnings),
            draft=draft,
        )
    ]
