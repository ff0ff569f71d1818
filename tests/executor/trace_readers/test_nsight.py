from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from claw_plan.executor.trace_readers.nsight import read_nsight
from claw_plan.profiles.errors import InputError

PROCESS = 5 << 24
THREAD = PROCESS + 77

TABLES = {
    "StringIds": "id INTEGER, value TEXT",
    "TARGET_INFO_GPU": "id INTEGER, name TEXT",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start INTEGER, end INTEGER, deviceId INTEGER, "
    "streamId INTEGER, correlationId INTEGER, globalPid INTEGER, shortName INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start INTEGER, end INTEGER, deviceId INTEGER, "
    "streamId INTEGER, correlationId INTEGER, globalPid INTEGER",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER, end INTEGER, globalTid INTEGER, "
    "correlationId INTEGER",
    "NVTX_EVENTS": "start INTEGER, end INTEGER, globalTid INTEGER, textId INTEGER, text TEXT",
}  # As `nsys export --type sqlite` makes them, less the columns that are not read.

ROWS: dict[str, list[tuple[Any, ...]]] = {
    "StringIds": [(1, "ampere_sgemm"), (2, "ncclDevKernel_AllReduce_Sum_f32_RING_LL")],
    "TARGET_INFO_GPU": [(0, "NVIDIA A100-SXM4-80GB")],
    "CUPTI_ACTIVITY_KIND_KERNEL": [
        (1000, 1900, 0, 7, 11, PROCESS, 1),
        (2000, 2500, 0, 9, 12, PROCESS, 2),
    ],
    "CUPTI_ACTIVITY_KIND_MEMCPY": [(500, 700, 0, 7, 10, PROCESS)],
    "CUPTI_ACTIVITY_KIND_RUNTIME": [(900, 950, THREAD, 11), (1500, 1550, THREAD, 12)],
    "NVTX_EVENTS": [
        (100, 3000, THREAD, None, "step 4"),
        (1400, 1600, THREAD, None, "ncclAllReduce"),
    ],
}


def write(path: Path, rows: dict[str, list[tuple[Any, ...]]], tables: Iterable[str]) -> Path:
    with closing(sqlite3.connect(path)) as database:
        for name in tables:
            database.execute(f"CREATE TABLE {name} ({TABLES[name]})")
            for row in rows.get(name, []):
                marks = ", ".join("?" * len(row))
                database.execute(f"INSERT INTO {name} VALUES ({marks})", row)
        database.commit()
    return path


def test_kernels_steps_and_collectives(tmp_path: Path) -> None:
    (trace,) = read_nsight(write(tmp_path / "a.sqlite", ROWS, TABLES), "a.sqlite")
    assert trace.activities.start_ns.tolist() == [500, 1000]
    assert trace.device == "NVIDIA A100-SXM4-80GB" and trace.is_gpu and trace.rank is None
    assert [(s.number, s.start_ns, s.end_ns) for s in trace.steps] == [(4, 100, 3000)]
    (one,) = trace.collectives
    assert (one.op, one.start_ns, one.end_ns, one.issue_ns) == ("all_reduce", 2000, 2500, 1500)


def test_an_export_without_ranges_is_one_step(tmp_path: Path) -> None:
    tables = ("StringIds", "CUPTI_ACTIVITY_KIND_KERNEL")
    (trace,) = read_nsight(write(tmp_path / "a.sqlite", ROWS, tables), "a.sqlite")
    assert len(trace.activities) == 1 and trace.steps[0].end_ns == 2500


def test_two_processes_are_two_ranks_in_order_of_their_devices(tmp_path: Path) -> None:
    other = 3 << 24
    rows = ROWS | {
        "CUPTI_ACTIVITY_KIND_KERNEL": [
            (1000, 1900, 1, 7, 11, other, 1),
            (2000, 2600, 0, 7, 12, PROCESS, 1),
        ]
    }
    first, second = read_nsight(write(tmp_path / "a.sqlite", rows, TABLES), "a.sqlite")
    assert first.activities.end_ns.tolist() == [700, 2600]
    assert second.activities.end_ns.tolist() == [1900]


@pytest.mark.parametrize(
    ("rows", "tables", "said"),
    [
        (ROWS, ("StringIds",), "without the table CUPTI_ACTIVITY_KIND_KERNEL"),
        ({}, tuple(TABLES), "is empty: no kernel ran"),
    ],
)
def test_other_databases_are_refused(
    tmp_path: Path, rows: dict[str, list[tuple[Any, ...]]], tables: tuple[str, ...], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        read_nsight(write(tmp_path / "a.sqlite", rows, tables), "a.sqlite")


def test_a_view_is_never_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.sqlite", ROWS, ("StringIds",))
    endless = (
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x AS start, "
        "x AS end, x AS deviceId, x AS streamId, x AS correlationId, x AS shortName FROM n"
    )
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS {endless}")
        database.commit()
    with pytest.raises(InputError, match="without the table"):
        read_nsight(path, "a.sqlite")


def test_broken_values_and_files_are_one_line(tmp_path: Path) -> None:
    broken = [
        ("x", 5, 0, 7, 1, PROCESS, 1),
        (9, 5, 0, 7, 2, PROCESS, 1),
        (-9, 5, 0, 7, 2, PROCESS, 1),
    ]
    rows = ROWS | {"CUPTI_ACTIVITY_KIND_KERNEL": [*ROWS["CUPTI_ACTIVITY_KIND_KERNEL"], *broken]}
    (trace,) = read_nsight(write(tmp_path / "a.sqlite", rows, TABLES), "a.sqlite")
    assert "2 events have no plausible time: left out" in trace.warnings
    assert "1 events end before they start: left out" in trace.warnings
    whole = (tmp_path / "a.sqlite").read_bytes()
    cut = tmp_path / "cut.sqlite"
    cut.write_bytes(whole[: len(whole) // 3])
    with pytest.raises(InputError, match=r"cut\.sqlite cannot be read as an Nsight"):
        read_nsight(cut, "cut.sqlite")


def test_a_broken_schema_that_is_no_text_is_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.sqlite", ROWS, TABLES)
    damaged = path.read_bytes().replace(b"tableStringIds", b"tableStr\xdfngIds")
    path.write_bytes(damaged.replace(b"CREATE TABLE StringIds", b"CREATE TABLE (tringIds"))
    with pytest.raises(InputError, match=r"a\.sqlite cannot be read as an Nsight"):
        read_nsight(path, "a.sqlite")
