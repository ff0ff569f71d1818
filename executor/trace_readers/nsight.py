"""An Nsight Systems export (`nsys export --type sqlite`) becomes `RankTrace`s, one a process.

Kernels, copies and their launches come from the CUPTI tables, steps and NCCL's calls from NVTX
ranges. The export has no sizes of collectives. The database is opened read-only and only tables
are asked, never views, which could hold any program.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from claw_plan.executor.trace_readers.kineto import COMM_KERNEL, MAX_EVENTS
from claw_plan.executor.trace_readers.kineto_columns import Columns, CommOp, Facts
from claw_plan.executor.trace_readers.rank_trace import RankTrace
from claw_plan.profiles.errors import InputError

SQLITE_MAGIC = b"SQLite format 3\x00"
KERNELS, RUNTIME = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"
COPIES = {"CUPTI_ACTIVITY_KIND_MEMCPY": "Memcpy", "CUPTI_ACTIVITY_KIND_MEMSET": "Memset"}
NEEDED = {
    KERNELS: ("start", "end", "deviceId", "streamId", "correlationId", "shortName"),
    **dict.fromkeys(COPIES, ("start", "end", "deviceId", "streamId", "correlationId")),
    RUNTIME: ("start", "globalTid", "correlationId"),
    "NVTX_EVENTS": ("start", "end", "text", "globalTid"),
    "StringIds": ("id", "value"),
    "TARGET_INFO_GPU": ("id", "name"),
}
"""Tables and columns as Nsight Systems 2021 to 2025 export them."""

STEP = re.compile(r"(?:step|iter(?:ation)?|batch)\D{0,3}(\d{1,12})", re.IGNORECASE)
NCCL_CALL = re.compile(r"nccl(AllReduce|AllGather|ReduceScatter|Broadcast|Bcast|Reduce|Send|Recv)")
PROCESS_SHIFT = 24
"""A globalTid is the process in its upper bits and the thread in the lower 24."""

MAX_NAMES = 2_000_000
LAST_NS = 1 << 61


def read_nsight(path: Path, source: str) -> list[RankTrace]:
    """The processes with kernels, in order of their devices; no rank is told.

    Raises InputError for a database that is no such export.
    """
    address = f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(address, uri=True)) as database:
            database.text_factory = lambda text: text.decode("utf-8", "replace")
            database.execute("PRAGMA trusted_schema=OFF")
            return _Export(database, source).rank_traces()
    except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
        # The last: SQLite quotes a broken schema in its message, and Python decodes that.
        raise InputError(
            f"{source} cannot be read as an Nsight Systems export ({error}); export it again with "
            "nsys export --type sqlite"
        ) from None


class _Export:
    """The open database."""

    def __init__(self, database: sqlite3.Connection, source: str) -> None:
        self._database = database
        self._source = source
        self._columns = {name: self._columns_of(name) for name in NEEDED}
        if not self._columns[KERNELS]:
            raise InputError(
                f"{source} is a database without the table {KERNELS}: no Nsight Systems export "
                "with CUDA kernels; record with nsys profile --trace=cuda,nvtx"
            )
        self._names = self._strings()

    def _columns_of(self, table: str) -> set[str]:
        """The table's columns; none when it, or one that is needed, is missing."""
        kind = self._database.execute(
            "SELECT type FROM sqlite_master WHERE name = ? AND sql NOT LIKE '%VIRTUAL%'", (table,)
        ).fetchone()
        if kind is None or kind[0] != "table":
            return set()
        found = {row[1] for row in self._database.execute(f"PRAGMA table_info({table})")}
        return found if found.issuperset(NEEDED[table]) else set()

    def _rows(self, table: str, *columns: str) -> Iterator[tuple[Any, ...]]:
        if not self._columns[table]:
            return
        chosen = ", ".join(
            f"substr({name}, 1, 500)" if name in ("text", "value", "name") else name
            if name in self._columns[table] else "NULL"
            for name in columns
        )  # fmt: skip
        for count, row in enumerate(self._database.execute(f"SELECT {chosen} FROM {table}")):
            if count >= MAX_EVENTS:
                raise InputError(f"{self._source}: {table} has more than {MAX_EVENTS:,} rows")
            yield row

    def _strings(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for key, value in self._rows("StringIds", "id", "value"):
            if type(key) is int and len(names) < MAX_NAMES:
                names[key] = str(value)
        return names

    def rank_traces(self) -> list[RankTrace]:
        """One for each process; its kernels are told apart by `globalPid`."""
        processes: dict[int, Columns] = {}
        devices: dict[int, int] = {}
        self._kernels(processes, devices)
        if not processes:
            raise InputError(f"{self._source}: {KERNELS} is empty: no kernel ran while recording")
        self._launches(processes)
        self._ranges(processes)
        gpus = {key: str(name) for key, name in self._rows("TARGET_INFO_GPU", "id", "name")}
        found = []
        for process in sorted(processes, key=lambda one: (devices[one], one)):
            processes[process].facts.devices = [{"name": gpus.get(devices[process], "")}]
            trace = processes[process].rank_trace()
            found.append(replace(trace, warnings=(*trace.warnings, *self._lacks(trace))))
        return found

    def _lacks(self, trace: RankTrace) -> list[str]:
        said = []
        if trace.collectives:
            said.append("Nsight Systems does not record the sizes of collectives")
        return said

    def _kernels(self, processes: dict[int, Columns], devices: dict[int, int]) -> None:
        fields = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")
        for table, what in ((KERNELS, ""), *COPIES.items()):
            for *numbers, name in self._rows(table, *fields, "shortName"):
                numbers = [0 if one is None else one for one in numbers]
                start, end, device, stream, correlation, process = numbers
                columns = processes.setdefault(
                    process if type(process) is int else 0, Columns(self._source, Facts())
                )
                if not all(type(one) is int and 0 <= one < LAST_NS for one in numbers[:5]):
                    columns.broken("have no plausible time")
                    continue
                if end < start:
                    columns.broken("end before they start")
                    continue
                devices.setdefault(process if type(process) is int else 0, device)
                text = what or self._names.get(name, str(name))
                columns.kernel(start, end, text, str((device, stream)), correlation)
                if not what and COMM_KERNEL.search(text):
                    columns.comm_kernels.append(len(columns.kernels) // 5 - 1)
                    columns.comm_kernel_args.append({})
        for process in [one for one in processes if one not in devices]:
            del processes[process]

    def _process_of(self, thread: object, processes: dict[int, Columns]) -> Columns | None:
        """Kernels name a process by its upper bits too; older exports name none."""
        if type(thread) is not int:
            return None
        return processes.get(thread >> PROCESS_SHIFT << PROCESS_SHIFT, processes.get(0))

    def _launches(self, processes: dict[int, Columns]) -> None:
        for start, thread, correlation in self._rows(
            RUNTIME, "start", "globalTid", "correlationId"
        ):
            columns = self._process_of(thread, processes)
            whole = all(type(one) is int and 0 <= one < LAST_NS for one in (start, correlation))
            if columns is not None and whole:
                columns.launch(correlation, start, columns.thread(0, thread))

    def _ranges(self, processes: dict[int, Columns]) -> None:
        fields = ("start", "end", "globalTid", "textId", "text")
        for start, end, thread, key, text in self._rows("NVTX_EVENTS", *fields):
            columns = self._process_of(thread, processes)
            if columns is None or type(start) is not int or type(end) is not int:
                continue
            if not 0 <= start <= end < LAST_NS:
                columns.broken("have no plausible time")
                continue
            name = str(text) if text else self._names.get(key, "")
            if called := NCCL_CALL.search(name):
                op = CommOp(f"nccl:{called[1]}", start, end, columns.thread(0, thread), {})
                columns.comm_ops.append(op)
            elif step := STEP.search(name):
                columns.steps.append((int(step[1]), start, end))
