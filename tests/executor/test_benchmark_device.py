from __future__ import annotations

from typing import Any

import pytest
import torch

from claw_plan.executor.benchmark_device import (
    DeviceRates,
    measure_device,
    measure_local_group,
    with_rates,
)
from claw_plan.profiles.cluster_file import cluster_from_mapping
from claw_plan.profiles.work import CollectiveWork


def test_a_device_multiplies_copies_and_launches() -> None:
    found = measure_device(
        torch.device("cpu"), sizes=(64, 128), dtypes=("float32",), copy_bytes=1 << 20
    )
    assert set(found.flops_per_s) == {"float32"}
    assert 1e6 < found.flops_per_s["float32"] < 1e14
    assert 1e7 < found.copy_bytes_per_s < 1e13
    assert found.launch_ns > 100


@pytest.mark.slow
def test_devices_of_a_host_are_measured_together() -> None:
    samples = measure_local_group(2, "cpu", sizes_bytes=(1 << 10, 1 << 12))
    assert {work.group_size for work in samples} == {2}
    assert len(samples) == 12


def measured(gb_per_s: float) -> dict[CollectiveWork, tuple[int, ...]]:
    return {
        CollectiveWork(op="send", bytes=size, group_size=2, nodes=1): (
            round(4000 + size / gb_per_s),
        )
        for size in (1 << 12, 1 << 20, 1 << 28)
    }


NODE: dict[str, Any] = {
    "devices": {"type": "h100-sxm-80gb", "count": 8},
    "intra": {"type": "nvswitch4"},
}
RATES = DeviceRates(flops_per_s={"bfloat16": 700e12}, copy_bytes_per_s=3e12, launch_ns=6000)


def test_measured_figures_take_the_place_of_nominal_ones() -> None:
    entry, notes = with_rates(NODE, RATES, measured(400), "measured here")
    (node,) = cluster_from_mapping({"nodes": [entry]}, "t").nodes
    assert node.device.achieved_flops_per_s["bfloat16"] == 700e12
    assert node.device.kernel_launch_ns == 6000
    assert node.device.memory_bytes_per_s == 3350e9  # within a quarter: the data sheet's stays
    assert node.intra.rate("send") == pytest.approx(400e9, rel=0.01)
    assert node.intra.bytes_per_s == 450e9
    assert notes == []


def test_what_is_far_from_nominal_overrides_it_and_is_told() -> None:
    slow = DeviceRates(flops_per_s={"bfloat16": 1e12}, copy_bytes_per_s=1e12, launch_ns=6000)
    entry, notes = with_rates(NODE, slow, measured(20), "measured here")
    assert entry["devices"]["bandwidth"] == "1000 GB/s"
    assert [note.split(":")[0] for note in notes] == ["memory of h100-sxm-80gb", "link nvswitch4"]


def test_single_pairs_stay_beside_the_measured_rest() -> None:
    intra = {"default": {"type": "pcie5-x16"}, "pairs": [[0, 1, "nvlink4 x18"]]}
    entry, _ = with_rates(NODE | {"intra": intra}, RATES, measured(50), "here")
    assert entry["intra"]["pairs"] == [[0, 1, "nvlink4 x18"]]
    assert entry["intra"]["default"]["achieved"] == {"send": "50 GB/s"}
