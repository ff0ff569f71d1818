"""`claw-plan topology` through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from claw_plan.cli.main import cli
from claw_plan.profiles.cluster_file import load_cluster

MATRIX = (
    "\tGPU0\tGPU1\tNIC0\tCPU Affinity\nGPU0\t X \tNV12\tPIX\t0-15\nGPU1\tNV12\t X \tSYS\t0-15\n"
    "NIC0\tPIX\tSYS\t X \n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["topology", *arguments], catch_exceptions=True)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "topo.txt").write_text(MATRIX)
    (tmp_path / "hosts").write_text("n1 slots=2\nn2 slots=2\n")
    return tmp_path


def test_json_has_the_documented_keys(files: Path) -> None:
    done = call(str(files / "topo.txt"), "--json")
    found = json.loads(done.output)
    assert found["gpus"] == {"count": 2, "types": []}
    assert found["pairs"] == {"NV12": [[0, 1]]}
    assert found["nics"] == {"NIC0": ["PIX", "SYS"]}
    assert found["nic_devices"] == {"NIC0": "mlx5_0"}
    assert found["warnings"] == []
    assert len(found["unknown"]) == 2
    assert [part["file"] for part in found["files"]] == ["topo.txt"]


def test_several_files_describe_one_cluster(files: Path) -> None:
    out = files / "cluster.yaml"
    done = call(str(files / "topo.txt"), str(files / "hosts"), "--gpu", "a100-80gb", "--nic",
                "ib-hdr", "-o", str(out), "--json")  # fmt: skip
    assert done.exit_code == 0
    cluster = load_cluster(str(out))
    assert [node.device_count for node in cluster.nodes] == [2, 2]
    found = json.loads(done.output[: done.output.rindex("}") + 1])
    assert found["assumed"] == []
    assert [host["name"] for host in found["hosts"]] == ["n1", "n2"]


def test_people_read_what_is_understood_unknown_and_suspicious(files: Path) -> None:
    (files / "cut.txt").write_text(MATRIX.replace("GPU1\tNV12\t X \tSYS\t0-15", "GPU1\tNV"))
    text = call(str(files / "cut.txt")).output
    assert "NV12: 1 pairs: 0-1" in text
    assert "NIC0 (mlx5_0): PIX SYS" in text
    assert "suspicious:\n    cut.txt:3: row GPU1 has 0 readable cells of 3" in text


def test_hosts_can_be_chosen(files: Path) -> None:
    found = json.loads(call(str(files / "hosts"), "--include", "n2", "--json").output)
    assert found["hosts"] == [{"name": "n2", "gpus": 2}]
    done = call(str(files / "hosts"), "--include", "n1:2,3")
    assert "n1 has slots 0,1" in done.output


def test_two_machines_are_told_apart(files: Path) -> None:
    (files / "other.txt").write_text("\tGPU0\nGPU0\t X \n")
    (files / "pcie.txt").write_text(MATRIX.replace("NV12", "PHB"))
    found = json.loads(call(str(files / "topo.txt"), str(files / "pcie.txt"), "--json").output)
    assert found["pairs"] == {"NV12": [[0, 1]]}
    assert "2 machines are described" in found["warnings"][-1]


def test_a_file_is_not_overwritten_by_its_own_reading(files: Path) -> None:
    done = call(str(files / "topo.txt"), "-o", str(files / "topo.txt"))
    assert done.exit_code != 0
    assert (files / "topo.txt").read_text() == MATRIX
