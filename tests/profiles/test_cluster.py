from __future__ import annotations

from pathlib import Path

import pytest

from claw_plan.profiles.cluster import Link
from claw_plan.profiles.cluster_file import load_cluster


def test_devices_are_numbered_node_by_node(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("nodes: [{type: gb200-nvl72-tray}, {type: dgx-h100}]")
    cluster = load_cluster(str(path))
    assert cluster.num_devices == 12
    assert [cluster.locate(device) for device in (0, 3, 4, 11)] == [(0, 0), (0, 3), (1, 0), (1, 7)]
    with pytest.raises(IndexError, match="12 devices; there is no 12"):
        cluster.locate(12)
    assert not cluster.is_uniform


def test_backends() -> None:
    assert load_cluster("dgx-h100").backend == "nccl"
    assert load_cluster("cpu").backend == "gloo"


def test_devices_share_the_nics() -> None:
    # p4d: four NICs of 100 Gb/s for eight devices.
    assert load_cluster("p4d.24xlarge").nodes[0].nic_bytes_per_s_per_device == 6.25e9


def test_a_link_without_achieved_rates_reaches_its_own() -> None:
    link = Link(name="l", bytes_per_s=10.0, latency_ns=1, source="test")
    assert link.rate("all_reduce") == 10.0
    slower = Link(
        name="l",
        bytes_per_s=10.0,
        latency_ns=1,
        source="test",
        achieved_bytes_per_s={"send": 9.0, "other": 5.0},
    )
    assert (slower.rate("send"), slower.rate("all_gather")) == (9.0, 5.0)
