"""Tables of collective times, as collectives.yaml, to `CollectiveRow`s.

A table is a list of rows with a collective, ranks, bytes and a time or a bandwidth, in the
conventions of nccl-tests: `bytes` is the whole buffer, busbw = bytes / time * 2 (n - 1)/n for
all_reduce and (n - 1)/n for the others (github NVIDIA/nccl-tests, doc/PERFORMANCE.md). XLA's
table has `shape_bytes`, and `groups` that talk at the same time. Its shape is the result's: for
reduce_scatter one rank's part, and `time_us`, made from it, is the same part of the whole time
(read so, reduce_scatter's times are those of all_gather; else it would take 1.6 us on 72 ranks).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.hardware_text import Hardware, hardware_of
from claw_plan.profiles.published_fields import BrokenRows, Fields, Row, shown
from claw_plan.profiles.published_rows import (
    COLLECTIVES,
    CollectiveRow,
    NotExpressed,
    Published,
)
from claw_plan.profiles.units import NS_PER_S, NS_PER_US
from claw_plan.profiles.work import CollectiveWork

_OPS = {
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "sendrecv": "send",
    "send": "send",
    "broadcast": "broadcast",
}


class _CannotRepeat(Exception):
    """Why a sound row cannot be predicted."""


def is_collectives(data: Any) -> bool:
    """Whether the data of a YAML file holds tables of collectives."""
    tables = data.values() if isinstance(data, Mapping) else [data]
    firsts = [table[0] for table in tables if isinstance(table, list) and table]
    return any(isinstance(row, Mapping) and "collective" in row for row in firsts)


def read_collectives(path: Path, data: Any) -> Published:
    """The rows of a file; raises InputError where every row is broken."""
    tables = data if isinstance(data, Mapping) else {"": data}
    rows: list[CollectiveRow] = []
    others: list[NotExpressed] = []
    broken = BrokenRows()
    for name, table in tables.items():
        if not isinstance(table, list):
            raise Row(path, (name,), name).fail("", "a table is a list of rows")
        for index, values in enumerate(table):
            keys = (name, index) if isinstance(data, Mapping) else (index,)
            row = Row(path, keys, f"{name}[{index}]")
            with broken.caught(row.name, str(name)):
                if not isinstance(values, Mapping):
                    raise row.fail("", f"must hold keys and values; got {shown(values)}")
                fields = Fields(row, values)
                try:
                    rows.append(_row(fields))
                except _CannotRepeat as reason:
                    family = f"{fields.text('collective')} {fields.text('gpu', 'not stated')}"
                    others.append(NotExpressed(id=row.name, family=family, reason=str(reason)))
    others += broken.among(len(rows) + len(others))
    return Published(
        path=path, kind=COLLECTIVES, collectives=tuple(rows), not_expressed=tuple(others)
    )


def _row(fields: Fields) -> CollectiveRow:
    name, gpu = fields.text("collective"), fields.text("gpu", "not stated")
    op = _OPS.get(name.lower())
    if op is None:
        raise fields.fail("collective", f"must be one of {', '.join(_OPS)}; got {name!r}")
    note = fields.text("note", "")
    _check(fields, note)
    hardware = _hardware(fields, gpu, note)
    work = _work(fields, op, hardware, note)
    return CollectiveRow(
        id=fields.row.name,
        family=f"{name} {gpu}",
        group=f"{fields.text('source', '')}|{gpu}|{work.group_size}|{work.nodes}",
        cluster=hardware.cluster,
        device_name=hardware.device_name,
        work=work,
        measured_ns=_time_ns(fields, work),
        nvls=_nvls(note),
        time_share=1 / _parts(fields, op),
        assumed=hardware.assumed,
        flags=fields.texts("flags"),
        source=fields.text("source", ""),
    )


def _check(fields: Fields, note: str) -> None:
    """Refuses rows whose figures do not say what was timed."""
    topology = fields.text("topology_note", "")
    if "not recorded" in topology:
        raise _CannotRepeat(f"topology not recorded ({topology})")
    if "ambiguous" in note:
        raise _CannotRepeat(f"the source does not say for sure what was timed ({note})")
    if fields.whole("ranks") == 1:
        raise _CannotRepeat("one rank has nobody to exchange with")
    if "bytes" not in fields and "shape_bytes" not in fields:
        raise _CannotRepeat("a bandwidth without a message size")
    if "strided" in note:
        raise _CannotRepeat("ranks strided over nodes: where they stand is not said")


def _hardware(fields: Fields, gpu: str, note: str) -> Hardware:
    ranks, per_node = fields.whole("ranks"), fields.whole("gpus_per_node", 8)
    nodes = fields.whole("nodes", -(-ranks // per_node))
    total = fields.whole("total_devices", max(ranks, nodes * per_node if nodes > 1 else 0))
    inter = fields.text("inter", "")
    joined = not re.search(r"(across|different) (nvlink )?domains", f"{inter} {note}".lower())
    try:
        return hardware_of(gpu, total, per_node, fields.text("intra", ""), inter, joined=joined)
    except InputError as error:
        raise _CannotRepeat(str(error)) from None


def _work(fields: Fields, op: str, hardware: Hardware, note: str) -> CollectiveWork:
    ranks = fields.whole("ranks")
    size = fields.whole("shape_bytes" if "shape_bytes" in fields else "bytes") * _parts(fields, op)
    reach = hardware.cluster.nodes[0].device_count
    nodes = -(-ranks // reach)
    if "nodes" in fields and len(hardware.cluster.nodes) > 1:
        nodes = min(ranks, fields.whole("nodes"))
    devices = hardware.cluster.num_devices
    groups = fields.whole("groups", max(1, devices // ranks) if ranks == devices else 1)
    return CollectiveWork(
        op=op,
        bytes=size,
        group_size=ranks,
        nodes=nodes,
        algorithm="ring" if _nvls(note) is False else "auto",
        concurrent=0 if groups * ranks >= devices else groups,
    )


def _parts(fields: Fields, op: str) -> int:
    """Of how many parts of the buffer the row's bytes and time are one."""
    return fields.whole("ranks") if op == "reduce_scatter" and "shape_bytes" in fields else 1


def _nvls(note: str) -> bool | None:
    """Whether NVLink's switches reduced, as far as the note tells."""
    words = note.lower()
    if re.search(r"nvls_enable=0|nvls off|\bring\b", words):
        return False
    return True if "nvls from" in words else None


def _time_ns(fields: Fields, work: CollectiveWork) -> float:
    if "time_us" in fields:
        return fields.number("time_us") * NS_PER_US
    n = work.group_size
    share = 1.0 if work.op in ("send", "broadcast") else (n - 1) / n
    factor = 2 * share if work.op == "all_reduce" else share
    return work.bytes * factor / (fields.number("busbw_gb_s") * 1e9) * NS_PER_S
