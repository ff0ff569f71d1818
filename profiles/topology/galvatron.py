"""Galvatron's hardware profiles (JSON) to a `Reading` with measured rates.

Its bandwidths are those of its own profile, in GB/s: what a collective achieved, no link's speed.
`consec_1` groups are neighbouring ranks, `consec_0` strided ones.
"""

from __future__ import annotations

import re

from claw_plan.profiles.files import Document
from claw_plan.profiles.topology.reading import Rate, Reading
from claw_plan.profiles.topology.source import Source
from claw_plan.profiles.topology.structured import number

FORMAT = "Galvatron hardware profile"

_KEYS = re.compile(
    r"allreduce_size_(?P<ring>\d{1,6})_consec_(?P<consecutive>[01])"
    r"|pp_size_(?P<stages>\d{1,6})"
    r"|(?P<op>allreduce|all2all|allgather|reducescatter|p2p)_size_(?P<group>\d{1,6})"
    r"_(?P<megabytes>\d{1,9})MB_time"
    r"|(?P<overlap>overlap_coe)"
)
_NAME = re.compile(r"(\d{1,5})nodes?_(\d{1,4})gpus?_per_node")
_OPS = {"allreduce": "all_reduce", "all2all": "all_to_all", "allgather": "all_gather"}
_OPS |= {"reducescatter": "reduce_scatter", "p2p": "send"}
_MAX_GB_S, _MAX_MS, _MAX_FACTOR = 10_000.0, 1e7, 100.0


def recognise(document: Document) -> bool:
    """Whether all keys are such as Galvatron writes."""
    keys = list(document.data)
    return bool(keys) and all(isinstance(key, str) and _KEYS.fullmatch(key) for key in keys)


def read(source: Source, document: Document) -> list[Reading]:
    """One Reading. Raises InputError for a value that is no plausible number."""
    rates: list[Rate] = []
    facts: list[str] = []
    spread = _NAME.search(source.name)
    nodes = int(spread[1]) if spread else None
    for key in document.data:
        match = _KEYS.fullmatch(key)
        assert match is not None
        where = document.where([key]).split(": ")[0]
        if match["overlap"]:
            factor = number(document, key, limit=_MAX_FACTOR)
            facts.append(f"compute and communication slow each other down {factor:.3f}-fold")
            continue
        size = None
        if match["op"]:
            op, ranks = _OPS[match["op"]], int(match["group"])
            size = int(match["megabytes"]) << 20
            speed = size / (number(document, key, limit=_MAX_MS) * 1e-3)
        else:
            op = "all_reduce" if match["ring"] else "send"
            ranks = int(match["ring"] or match["stages"])
            speed = number(document, key, limit=_MAX_GB_S) * 1e9
        whole = spread is not None and ranks >= int(spread[1]) * int(spread[2])
        # Pipeline stages of several nodes lie on different ones; small rings may lie on one.
        across = nodes if nodes == 1 or whole or match["stages"] else None
        rates.append(
            Rate(
                op=op,
                ranks=ranks,
                nodes=across,
                bytes_per_s=speed,
                kind="algorithm",
                where=where,
                size_bytes=size,
            )
        )
    if rates:
        facts.append("units assumed: GB/s = 1e9 bytes/s, MB = 2^20 bytes, time in ms")
    if spread:
        facts.append(f"by its name: {spread[1]} nodes of {spread[2]} GPUs")
    return [
        Reading(
            source=source.name,
            format=FORMAT,
            gpu_count=int(spread[2]) if spread else None,
            node_count=nodes,
            rates=tuple(rates),
            facts=tuple(facts),
            unknown=("the type of the GPUs", "the paths between GPUs", "the speed of links"),
        )
    ]
