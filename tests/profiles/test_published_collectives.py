"""Tables of collectives, by nccl-tests' conventions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.published_collectives import is_collectives, read_collectives
from claw_plan.profiles.published_fields import load_yaml
from claw_plan.profiles.published_rows import CollectiveRow, Published

DATA = Path(__file__).parents[3] / "shared" / "data" / "collectives.yaml"

Write = Callable[..., Path]
ROW: dict[str, Any] = {
    "collective": "all_reduce",
    "gpu": "H100-80GB",
    "ranks": 16,
    "gpus_per_node": 8,
    "nodes": 2,
    "intra": "NVLink4/NVSwitch",
    "inter": "8x ConnectX-7 400 Gb/s InfiniBand per node",
    "bytes": 1 << 20,
    "time_us": 93.25,
    "source": "a page",
}


def read(write_rows: Write, **changes: Any) -> Published:
    values = {key: value for key, value in (ROW | changes).items() if value is not None}
    path = write_rows({"nccl_tests": [values]})
    return read_collectives(path, load_yaml(path))


def one(write_rows: Write, **changes: Any) -> CollectiveRow:
    (row,) = read(write_rows, **changes).collectives
    return row


def test_a_row(write_rows: Write) -> None:
    row = one(write_rows)
    assert (row.id, row.family) == ("nccl_tests[0]", "all_reduce H100-80GB")
    assert row.measured_ns == 93_250
    work = row.work
    assert (work.op, work.bytes, work.group_size, work.nodes) == ("all_reduce", 1 << 20, 16, 2)
    assert row.cluster.nodes[0].nic_bytes_per_s_per_device == 50e9
    assert row.assumed == ()


@pytest.mark.parametrize(
    ("name", "op", "factor"),
    [
        ("all_reduce", "all_reduce", 2 * 15 / 16),
        ("all_gather", "all_gather", 15 / 16),
        ("reduce_scatter", "reduce_scatter", 15 / 16),
        ("alltoall", "all_to_all", 15 / 16),
        ("sendrecv", "send", 1.0),
    ],
)
def test_a_bandwidth_becomes_a_time(write_rows: Write, name: str, op: str, factor: float) -> None:
    row = one(write_rows, collective=name, time_us=None, busbw_gb_s=100.0)
    assert row.work.op == op
    assert row.measured_ns == pytest.approx((1 << 20) * factor / 100e9 * 1e9)


def test_groups_of_a_domain_talk_at_the_same_time(write_rows: Write) -> None:
    changes = {"gpu": "GB200", "ranks": 4, "gpus_per_node": 4, "nodes": None, "bytes": None}
    changes |= {"total_devices": 64, "shape_bytes": 4096, "inter": None, "groups": 1}
    alone = one(write_rows, **changes)
    assert (alone.work.nodes, alone.work.group_size, alone.work.bytes) == (1, 4, 4096)
    assert alone.cluster.nodes[0].device_count == 64
    assert alone.work.concurrent == 1
    assert one(write_rows, **changes | {"groups": 16}).work.concurrent == 0


def test_hosts_in_different_domains_are_not_joined(write_rows: Write) -> None:
    changes = {"gpu": "GB300", "ranks": 8, "gpus_per_node": 4, "nodes": 2}
    changes |= {"inter": "RDMA across NVLink domains (GKE A4X Max)"}
    row = one(write_rows, **changes)
    assert (row.work.nodes, row.cluster.nodes[0].device_count) == (2, 4)
    assert any("100 GB/s per GPU" in text for text in row.assumed)


@pytest.mark.parametrize(
    ("note", "algorithm", "nvls"),
    [
        ("NCCL_NVLS_ENABLE=0 (ring)", "ring", False),
        ("1 node P6-B200 (NVLS from 6 ranks)", "auto", True),
        ("default algo", "auto", None),
    ],
)
def test_notes_about_algorithms(
    write_rows: Write, note: str, algorithm: str, nvls: bool | None
) -> None:
    row = one(write_rows, note=note)
    assert (row.work.algorithm, row.nvls) == (algorithm, nvls)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ranks": 1, "nodes": 1}, "one rank has nobody to exchange with"),
        ({"bytes": None}, "a bandwidth without a message size"),
        ({"gpu": "not stated (8-GPU node)"}, "no figures for the GPU"),
        ({"note": "collective ambiguous"}, "does not say for sure"),
        ({"topology_note": "topology not recorded"}, "topology not recorded"),
        ({"note": "ranks strided across nodes/GPUs"}, "strided"),
    ],
)
def test_rows_that_cannot_be_repeated(
    write_rows: Write, changes: dict[str, Any], reason: str
) -> None:
    published = read(write_rows, **changes)
    assert published.collectives == ()
    assert reason in published.not_expressed[0].reason


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"collective": "gather_all"}, "collective must be one of"),
        ({"ranks": None}, "ranks is missing"),
        ({"time_us": None}, "busbw_gb_s is missing"),
        ({"time_us": -1.0}, "time_us must be a positive number"),
    ],
)
def test_broken_rows(write_rows: Write, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(write_rows, **changes)


def test_recognition() -> None:
    assert is_collectives({"nccl_tests": [ROW]})
    assert is_collectives([ROW])
    assert not is_collectives({"nodes": [{"count": 1}]})
    assert not is_collectives({"t": {"rows": [ROW]}})


@pytest.mark.skipif(not DATA.exists(), reason="the shared tables are not beside this checkout")
def test_all_published_collectives_are_read_or_listed() -> None:
    published = read_collectives(DATA, load_yaml(DATA))
    assert len(published.collectives) + len(published.not_expressed) == 474 + 2243
    # 210 rows of unknown topology, 22 without a size, 53 of unstated GPUs, 9 ambiguous.
    assert len(published.not_expressed) == 210 + 22 + 53 + 9
