from __future__ import annotations

from pathlib import Path

import pytest

from claw_plan.profiles.cluster import Cluster
from claw_plan.profiles.cluster_file import load_cluster
from claw_plan.profiles.errors import InputError
from claw_plan.profiles.topology.cluster_text import ClusterText, make_cluster
from claw_plan.profiles.topology.reading import Host, Nic, Rate, Reading, all_pairs


def machine(count: int = 4, kind: str = "NV12", **changes: object) -> Reading:
    values: dict[str, object] = {"gpu_count": count, "pairs": {kind: tuple(all_pairs(count))}}
    return Reading(source="topo.txt", format="t", **(values | changes))  # type: ignore[arg-type]


def hosts(*slots: int | None) -> Reading:
    names = tuple(Host(name=f"n{index}", gpus=slot) for index, slot in enumerate(slots))
    return Reading(source="hosts", format="hostfile", hosts=names, node_count=len(names))


def loaded(made: ClusterText, tmp_path: Path) -> Cluster:
    path = tmp_path / "cluster.yaml"
    path.write_text(made.text())
    return load_cluster(str(path))


def test_types_that_are_read_are_not_assumed(tmp_path: Path) -> None:
    made = make_cluster([machine(gpu_types=("NVIDIA A100-SXM4-80GB",) * 4)])
    (node,) = loaded(made, tmp_path).nodes
    assert (node.device.name, node.device_count) == ("a100-sxm-80gb", 4)
    assert node.intra.name == "nvswitch3"
    assert made.assumed == []


def test_what_is_assumed_stands_in_the_file(tmp_path: Path) -> None:
    made = make_cluster([machine(8, "NV18")])
    assert "# ASSUMED: the GPUs are h100-sxm-80gb: no file names the GPUs" in made.text()
    assert loaded(made, tmp_path).nodes[0].device.name == "h100-sxm-80gb"


def test_answers_replace_assumptions(tmp_path: Path) -> None:
    made = make_cluster([machine(), hosts(None, None)], gpu="a100-40gb", nic="ib-hdr")
    cluster = loaded(made, tmp_path)
    assert [node.device.name for node in cluster.nodes] == ["a100-sxm-40gb"] * 2
    assert cluster.nodes[0].nic.name == "ib-hdr"
    assert made.assumed == []


def test_unequal_hosts_become_several_entries(tmp_path: Path) -> None:
    made = make_cluster([hosts(2, 2, 1)], gpu="t4")
    assert [node.device_count for node in loaded(made, tmp_path).nodes] == [2, 2, 1]
    assert any("one 10 Gb/s network card" in text for text in made.assumed)


def test_files_of_other_numbers_of_gpus_are_told() -> None:
    other = Reading(source="log", format="t", gpu_count=4)
    made = make_cluster([machine(8), other])
    assert "topo.txt shows 8 GPUs, log 4: are they the same machine?" in made.warnings


def test_slots_that_contradict_the_matrix_are_told() -> None:
    made = make_cluster([machine(8), hosts(4)])
    assert any(text.startswith("which 4 of the GPUs of topo.txt") for text in made.assumed)
    assert made.content["nodes"][0]["devices"]["count"] == 4
    assert "topo.txt shows 8 GPUs, the hosts have 4 slots" in made.warnings[0]


def test_gpus_of_a_node_are_asked_for() -> None:
    with pytest.raises(InputError, match="hosts: the GPUs of a node are in no file; give --gpus"):
        make_cluster([hosts(None)])
    made = make_cluster([hosts(None)], gpus_per_node=8)
    assert made.content["nodes"][0]["devices"]["count"] == 8


def test_mixed_gpus_become_an_entry_each(tmp_path: Path) -> None:
    types = ("NVIDIA L4", "NVIDIA L4", "Tesla T4", "Tesla T4", "Tesla T4")
    made = make_cluster([machine(5, "PHB", gpu_types=types)])
    assert [node.device_count for node in loaded(made, tmp_path).nodes] == [2, 3]
    assert "mixes NVIDIA L4, Tesla T4" in made.assumed[0]


def test_two_machines_are_two_nodes(tmp_path: Path) -> None:
    made = make_cluster([machine(4, nics={"a": Nic(bytes_per_s=25e9)}), machine(2, "PHB")])
    assert [node.device_count for node in loaded(made, tmp_path).nodes] == [4, 2]


def test_measured_rates_win_over_the_fabric(tmp_path: Path) -> None:
    # NVLinks that trained while the fabric manager is not ready: NVIDIA/NVSentinel issue 883.
    rate = Rate(op="all_reduce", ranks=8, nodes=1, bytes_per_s=12e9, kind="bus", where="log:7")
    bench = Reading(source="log", format="nccl-tests log", rates=(rate,))
    made = make_cluster([machine(8, "NV18"), bench])
    assert loaded(made, tmp_path).nodes[0].intra.rate("all_reduce") == 12e9
    assert "measured 12 GB/s (log:7) overrides the nominal 450 GB/s" in made.warnings[0]


def test_unknown_answers_name_near_matches() -> None:
    with pytest.raises(InputError, match="unknown device 'a100-81gb'"):
        make_cluster([machine()], gpu="a100-81gb")
    with pytest.raises(InputError, match="unknown link 'ib-nrd'"):
        make_cluster([machine()], nic="ib-nrd")


def test_warnings_of_readings_are_repeated_in_the_file() -> None:
    made = make_cluster([machine(warnings=("GPU2 has\nno NVLink",))])
    assert "# SUSPICIOUS: GPU2 has no NVLink\n" in made.text()
