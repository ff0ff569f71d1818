from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from claw_plan.executor.detect_topology import (
    NVIDIA,
    local_reading,
    rails,
    refined,
    rocm_node,
    tool_output,
)
from claw_plan.profiles.cluster_file import cluster_from_mapping
from claw_plan.profiles.errors import InputError

MATRIX = (
    "\tGPU0\tGPU1\tGPU2\tNIC0\tNIC1\n"
    "GPU0\t X \tNV4\tSYS\tPIX\tSYS\nGPU1\tNV4\t X \tSYS\tPXB\tSYS\n"
    "GPU2\tSYS\tSYS\t X \tSYS\tPIX\nNIC Legend:\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n"
)
XGMI = (
    "==== Link Type between two GPUs ====\n GPU0 GPU1\nGPU0 0 XGMI\nGPU1 XGMI 0\n"
    "GPU[0]\t: Card Series: AMD Instinct MI300X\nGPU[1]\t: Card Series: AMD Instinct MI300X\n"
)


def prints(**texts: str) -> Callable[[Sequence[str]], str]:
    return lambda command: texts.get(command[-1].strip("-"), "")


def node(count: int = 3) -> dict[str, object]:
    return {"count": 1, "devices": {"type": "a100-pcie-80gb", "count": count}, "intra": "nvlink3"}


def test_uneven_links_come_from_the_matrix() -> None:
    reading = local_reading(NVIDIA, prints(m=MATRIX))
    entry = refined(node(), reading)
    assert entry["intra"]["pairs"] == [[0, 1, "nvlink3 x4"]]
    assert "rails: GPU0 mlx5_0, GPU1 mlx5_0, GPU2 mlx5_1" in entry["source"]
    assert "GPU2 has no NVLink" in entry["source"]
    assert cluster_from_mapping({"nodes": [entry]}, "t").num_devices == 3


def test_a_matrix_of_other_gpus_is_left_out() -> None:
    reading = local_reading(NVIDIA, prints(m=MATRIX))
    assert refined(node(8), reading) == node(8)
    assert refined(node(), None) == node()


def test_cards_that_are_alike_for_all_are_no_rails() -> None:
    reading = local_reading(NVIDIA, prints(m="\tGPU0\tNIC0\nGPU0\t X \tPIX\n"))
    assert reading is not None
    assert rails(reading) == []


def test_without_the_tool_nothing_is_read() -> None:
    assert local_reading(NVIDIA, prints()) is None
    assert local_reading(NVIDIA, prints(m="NVIDIA-SMI has failed")) is None
    assert tool_output(["no-such-program-here"]) == ""
    assert tool_output(["false"]) == ""


def test_amd_gpus_are_named_by_rocm_smi() -> None:
    entry = rocm_node(prints(showtopo=XGMI))
    assert entry is not None
    (found,) = cluster_from_mapping({"nodes": [entry]}, "t").nodes
    assert (found.device.name, found.device_count) == ("mi300x", 2)
    assert found.intra.name == "infinity-fabric-mi300x"
    assert rocm_node(prints()) is None


def test_amd_gpus_that_the_catalogue_has_not_are_refused() -> None:
    with pytest.raises(InputError, match="rocm-smi shows AMD Instinct MI210, which the catalogue"):
        rocm_node(prints(showtopo=XGMI.replace("MI300X", "MI210")))
