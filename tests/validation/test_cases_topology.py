"""Cases about machines, links and hostfiles that users of other tools reported.

Each test names the public issue it comes from and holds the outcome that its people wanted.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from claw_plan.profiles.cluster_file import load_cluster
from claw_plan.profiles.errors import InputError
from claw_plan.profiles.topology.cluster_text import make_cluster
from claw_plan.profiles.topology.recognise import read_text, read_topology
from claw_plan.profiles.topology.source import Source


def matrix(count: int, kind: str, *, off: int | None = None) -> str:
    """A `topo -m` matrix of GPUs joined by `kind`; one of them only by SYS."""
    lines = ["\t" + "\t".join(f"GPU{index}" for index in range(count)) + "\tCPU Affinity"]
    for row in range(count):
        cells = [
            " X " if row == column else "SYS" if off in (row, column) else kind
            for column in range(count)
        ]
        lines.append(f"GPU{row}\t" + "\t".join(cells) + f"\t{row}-{row}")
    return "\n".join(lines) + "\n"


def test_a_gpu_without_nvlink_is_named_and_its_pairs_stay_slow(tmp_path: Path) -> None:
    # NVIDIA/nccl issue 1182: never averaged away.
    gpus = "".join(
        f'<pci busid="0000:{index}a:00.0" class="0x030200" device="0x2330"><gpu dev="{index}" '
        f'sm="90" rank="{index}">'
        + ("" if index == 5 else '<nvlink target="fff" count="18" tclass="0x068000"/>')
        + "</gpu></pci>"
        for index in range(8)
    )
    text = f'<system version="1"><cpu numaid="0">{gpus}</cpu></system>'
    (reading,) = read_text(Source("topo.xml", text))
    assert any(warning.startswith("GPU5 has no NVLink") for warning in reading.warnings)
    made = make_cluster([reading])
    path = tmp_path / "c.yaml"
    path.write_text(made.text())
    (node,) = load_cluster(str(path)).nodes
    assert node.intra.name.startswith("pcie")
    assert node.pairs[0, 1].bytes_per_s == 450e9
    assert (0, 5) not in node.pairs
    assert "# SUSPICIOUS: GPU5 has no NVLink" in made.text()


def test_measured_bandwidth_overrides_a_fabric_that_is_not_ready() -> None:
    # NVIDIA/NVSentinel issue 883, Dstack-TEE/dstack issue 1167: topology alone is no proof.
    log = (
        "all_reduce_perf -b 1G\n#  size  count  type  redop  root  time  algbw  busbw #wrong\n"
        + "".join(f"#  Rank {r} Group 0 Pid 1 on n1 device {r} [0x1] NVIDIA H100 80GB HBM3\n"
                  for r in range(8))
        + "  1073741824  268435456  float  sum  -1  1.0  4.0  7.0  0  1.0  4.0  7.0  0\n"
    )  # fmt: skip
    readings = [*read_text(Source("t", matrix(8, "NV18"))), *read_text(Source("log", log))]
    made = make_cluster(readings)
    (entry,) = made.content["nodes"]
    assert entry["intra"]["achieved"] == {"all_reduce": "7 GB/s"}
    assert "measured 7 GB/s (log:11) overrides the nominal 450 GB/s" in made.warnings[0]


def test_a_table_with_gp0_labels_is_refused() -> None:
    # NVIDIA/go-dcgm issue 46.
    text = "      GP0   GP1   CPUAffinity\nGP0    X   .SYS   0-13 .\nGP1   SYS    X    0-13 .\n"
    with pytest.raises(InputError, match=r"t:2: the row is labelled 'GP0'.*a malformed table"):
        read_text(Source("t", text))


def test_near_peers_may_be_slow_and_the_measurement_is_accepted(tmp_path: Path) -> None:
    # NVIDIA/nccl issue 1817: PIX, yet 6 GB/s.
    path = tmp_path / "c.yaml"
    path.write_text(
        "nodes:\n- devices: {type: l4, count: 8}\n"
        "  intra: {type: pcie4-x16, achieved: {all_reduce: 6 GB/s}}\n"
    )
    cluster = load_cluster(str(path))
    assert cluster.nodes[0].intra.rate("all_reduce") == 6e9
    assert any("measured 6 GB/s" in text for text in cluster.assumptions)


def test_the_slower_direction_of_an_uneven_network_counts(tmp_path: Path) -> None:
    # NVIDIA/nccl issue 1581: sends leave by the 1 GbE card.
    path = tmp_path / "c.yaml"
    path.write_text(
        "nodes:\n- count: 2\n  devices: {type: rtx-4090, count: 3}\n"
        "  nics: {type: ethernet-10, achieved: {other: 0.125 GB/s}, achieved_source: iperf}\n"
    )
    cluster = load_cluster(str(path))
    assert cluster.nodes[0].nic.rate("send") == 0.125e9
    assert any("measured 0.125 GB/s (iperf)" in text for text in cluster.assumptions)


def test_one_card_is_shared_by_all_gpus_of_its_node(tmp_path: Path) -> None:
    # NVIDIA/nccl issue 1536: 12.5 GB/s a node, not a GPU.
    path = tmp_path / "c.yaml"
    path.write_text(
        "nodes:\n- count: 2\n  devices: {type: a100-80gb, count: 8}\n  intra: nvswitch3\n"
        "  nics: {type: ib-edr, count: 1}\n"
    )
    (node, _) = load_cluster(str(path)).nodes
    assert node.nic_bytes_per_s_per_device == 12.5e9 / 8


def test_five_gpus_of_two_kinds_keep_their_kinds() -> None:
    # noonghunna/club-3090 issues 46 and 37: 5090, 5090, 4090, 4090, 4090.
    names = ["NVIDIA GeForce RTX 5090"] * 2 + ["NVIDIA GeForce RTX 4090"] * 3
    listed = "".join(f"GPU {i}: {name} (UUID: GPU-{i})\n" for i, name in enumerate(names))
    (reading,) = read_text(Source("t", listed + matrix(5, "PHB")))
    assert list(reading.gpu_types) == names
    made = make_cluster([reading])
    assert [entry["devices"]["count"] for entry in made.content["nodes"]] == [2, 3]
    assert made.content["nodes"][1]["devices"]["type"] == "rtx-4090"
    assert any("the catalogue has no 'NVIDIA GeForce RTX 5090'" in text for text in made.assumed)


def test_a_misspelt_key_of_a_hostfile_is_named_with_its_line() -> None:
    # deepspeedai/DeepSpeed issue 3669: the message printed '{line}'.
    with pytest.raises(InputError, match=r"hosts:2: 'lots=8' is not understood; did you mean"):
        read_text(Source("hosts", "10.0.0.1 slots=8\n10.0.0.2 lots=8\n"))


def test_a_hostfile_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    # deepspeedai/DeepSpeed issue 5221: it went on with the local machine alone.
    with pytest.raises(InputError, match="there is no file"):
        read_topology(tmp_path / "hostfile")


def test_a_host_that_stands_twice_is_an_error() -> None:
    # open-mpi/ompi issue 11136.
    with pytest.raises(InputError, match="hosts:2: the host node1 stands already in line 1"):
        read_text(Source("hosts", "node1 slots=4\nnode1 slots=4"))


def test_memory_without_end_is_refused() -> None:
    # calculon-ai/calculon systems/a100_80e.json.
    text = (
        '{"matrix": {"float16": {"tflops": 312}},\n "mem1": {"GiB": 80000000000, "GBps": 2048},\n'
        ' "networks": [{"bandwidth": 300, "size": 8, "latency": 0.00001}]}'
    )
    with pytest.raises(InputError, match=r"t:2: mem1\.GiB: 8e\+10 is implausible"):
        read_text(Source("t", text))
