"""GPUs and nodes in words, against the catalogue and the makers' node types."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.profiles import catalogue
from claw_plan.profiles.errors import InputError
from claw_plan.profiles.hardware_text import device_of, hardware_of


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H100-80GB", "h100-sxm-80gb"),
        ("H100 (sm_90)", "h100-sxm-80gb"),
        ("NVIDIA H100 PCIe 80GB", "h100-pcie-80gb"),
        ("H100-96GB-HBM2e-500W", "h100-96gb-hbm2e-500w"),
        ("H100 NVL", "h100-nvl-94gb"),
        ("H200", "h200-sxm-141gb"),
        ("H20", "h20-96gb"),
        ("NVIDIA GH200 SXM", "gh200-96gb"),
        ("GB200", "gb200-186gb"),
        ("B200-180GB", "b200-sxm-180gb"),
        ("GB300/B300 (sm_103)", "gb300-288gb"),
        ("B300", "b300-sxm-288gb"),
        ("A100 80GB PCIe", "a100-pcie-80gb"),
        ("A100-40GB", "a100-sxm-40gb"),
        ("A800-80GB", "a800-sxm-80gb"),
        ("V100-32GB", "v100-sxm-32gb"),
        ("V100-PCIE-32GB", "v100-pcie-32gb"),
        ("T4-16GB (g4dn.12xlarge)", "t4"),
        ("L4", "l4"),
        ("L40S", "l40s"),
        ("RTX A6000", "rtx-a6000"),
        ("A10G", "a10g"),
        ("A10", "a10"),
        ("MI100", "mi100"),
        ("MI210", "mi210"),
        ("AMD MI300A", "mi300a"),
        ("GeForce RTX 3090", "rtx-3090"),
        ("RTX 6000 Ada", "rtx-6000-ada"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("MI250 (MI200 series, 16 GCDs per node)", "mi250-gcd"),
        ("AMD Instinct MI300X", "mi300x"),
        ("8xH100", "h100-sxm-80gb"),
        ("A100 40G", "a100-sxm-40gb"),
        ("40GB A100", "a100-sxm-40gb"),
        ("A100-40G-PCIe", "a100-pcie-40gb"),
        ("V100 32G", "v100-sxm-32gb"),
        ("RTX3090", "rtx-3090"),
        ("RTX6000 Ada", "rtx-6000-ada"),
        ("TeslaT4", "t4"),
        ("MI355X", "mi355x"),
    ],
)
def test_names_of_gpus_in_words(text: str, name: str) -> None:
    assert device_of(text)[0] == name
    assert catalogue.device(name).source


def test_an_unstated_memory_size_is_said() -> None:
    assert "a100-sxm-80gb" in device_of("A100 (Ampere, memory size not stated)")[1]
    assert device_of("A100-80GB")[1] == ""


@pytest.mark.parametrize("text", ["not stated (8-GPU NVLink node)", "Gaudi 2", "TPU v4", ""])
def test_an_unknown_gpu_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(InputError, match="no figures for the GPU"):
        device_of(text)


def test_an_nvlink_domain_joins_hosts_of_four() -> None:
    hardware = hardware_of("GB200", 128, 4, "NVLink (NVL72 domain)", "4x ConnectX-7 400 Gb/s")
    node = hardware.cluster.nodes[0]
    assert len(hardware.cluster.nodes) == 2
    assert (node.device_count, node.nic_count, node.intra.name) == (64, 64, "nvswitch5-nvl72")
    assert node.nic.bytes_per_s == 50e9


def test_a_run_on_a_part_of_a_node() -> None:
    cluster = hardware_of("A100-80GB", 4, 8, "NVLink").cluster
    assert (len(cluster.nodes), cluster.num_devices) == (1, 4)


def test_what_a_text_leaves_open_is_assumed_and_said() -> None:
    hardware = hardware_of("H100-80GB", 16, 8)
    assert hardware.cluster.nodes[0].intra.name == "nvswitch4"
    assert hardware.cluster.nodes[0].nic_bytes_per_s_per_device == 50e9
    assert hardware.assumed == (
        "link inside a node not printed: nvswitch4",
        "network not printed: 50 GB/s per GPU",
    )


@pytest.mark.parametrize(
    ("gpu", "intra", "link"),
    [
        ("T4", "PCIe3", "pcie3-x16"),
        ("A100 80GB PCIe", "", "pcie4-x16"),
        ("H100 PCIe", "PCI Express", "pcie5-x16"),
        ("V100-16GB", "NVLink2 (hybrid cube mesh)", "nvlink2-mesh"),
        ("MI355X", "Infinity Fabric", "infinity-fabric-mi355x"),
        ("A800", "NVLink", "nvswitch3-a800"),
        ("A100 80GB PCIe", "NVLink bridge between pairs", "pcie4-x16"),
    ],
)
def test_links_inside_a_node(gpu: str, intra: str, link: str) -> None:
    assert hardware_of(gpu, 8, 8, intra).cluster.nodes[0].intra.name == link


@given(
    st.sampled_from(["H100", "A100-80GB", "GB200", "T4", "MI300X"]),
    st.integers(1, 600),
    st.sampled_from([1, 4, 8, 16]),
)
def test_a_cluster_has_the_gpus_of_the_run(gpu: str, count: int, per_node: int) -> None:
    cluster = hardware_of(gpu, count, per_node).cluster
    assert cluster.num_devices == count
    assert cluster.is_uniform
