from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from claw_plan.executor.benchmark_gpu import detect_gpu_node, gpu_node, infiniband_ports
from claw_plan.executor.errors import ExecutionError
from claw_plan.profiles.cluster_file import load_cluster
from claw_plan.profiles.units import MIB


def node(*names: str, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "names": names,
        "memory_bytes": 81559 * MIB,
        "nvlinks": 0,
        "pcie_generation": 4,
        "nics": None,
        "source": "NVML, driver 570",
    }
    return gpu_node(**(values | changes))


@pytest.mark.parametrize(
    ("name", "nvlinks", "device", "intra"),
    [
        ("Tesla V100-SXM2-32GB", 6, "v100-sxm-32gb", "nvlink2-mesh"),
        ("NVIDIA A100-SXM4-40GB", 12, "a100-sxm-40gb", "nvswitch3"),
        ("NVIDIA A100-SXM4-80GB", 12, "a100-sxm-80gb", "nvswitch3"),
        ("NVIDIA A100-PCIE-40GB", 0, "a100-pcie-40gb", "pcie4-x16"),
        ("NVIDIA A100 80GB PCIe", 12, "a100-pcie-80gb", "nvlink3 x12"),
        ("NVIDIA H100 80GB HBM3", 18, "h100-sxm-80gb", "nvswitch4"),
        ("NVIDIA H100 PCIe", 0, "h100-pcie-80gb", "pcie4-x16"),
        ("NVIDIA H200", 18, "h200-sxm-141gb", "nvswitch4"),
        ("NVIDIA B200", 18, "b200-sxm-180gb", "nvswitch5"),
        ("NVIDIA GB200", 18, "gb200-186gb", "nvswitch5-nvl72"),
        ("NVIDIA L4", 0, "l4", "pcie4-x16"),
        ("NVIDIA A10G", 0, "a10g", "pcie4-x16"),
        ("Tesla T4", 0, "t4", "pcie4-x16"),
        ("NVIDIA GeForce RTX 4090", 0, "rtx-4090", "pcie4-x16"),
    ],
)
def test_driver_names_become_catalogue_names(
    tmp_path: Path, name: str, nvlinks: int, device: str, intra: str
) -> None:
    entry = node(name, name, nvlinks=nvlinks, memory_bytes=15360 * MIB)
    assert entry["devices"]["type"] == device
    assert entry["intra"]["type"] == intra
    path = tmp_path / "m.yaml"
    path.write_text(yaml.safe_dump({"nodes": [entry]}))
    (loaded,) = load_cluster(str(path)).nodes
    assert loaded.device_count == 2
    assert loaded.device.memory_bytes == 15360 * MIB
    assert "NVML, driver 570" in loaded.device.source


@pytest.mark.parametrize("name", ["NVIDIA L40S", "NVIDIA RTX 4090 D", "NVIDIA H20", "NVIDIA T400"])
def test_unknown_gpus_are_refused_with_the_way_out(name: str) -> None:
    with pytest.raises(ExecutionError, match=r"is not in the catalogue; write a cluster\.yaml"):
        node(name)


def test_mixed_gpus_are_refused() -> None:
    with pytest.raises(ExecutionError, match="mixes GPUs \\(NVIDIA H200, NVIDIA L4\\)"):
        node("NVIDIA L4", "NVIDIA H200")


def port(folder: Path, name: str, rate: str, state: str = "4: ACTIVE") -> None:
    place = folder / name / "ports" / "1"
    place.mkdir(parents=True)
    (place / "rate").write_text(rate + "\n")
    (place / "state").write_text(state + "\n")
    (place / "link_layer").write_text("InfiniBand\n")


def test_the_fastest_active_ports_count(tmp_path: Path) -> None:
    assert infiniband_ports(tmp_path) is None
    for index in range(4):
        port(tmp_path, f"mlx5_{index}", "400 Gb/sec (4X NDR)")
    port(tmp_path, "mlx5_4", "100 Gb/sec (4X EDR)")
    port(tmp_path, "mlx5_5", "400 Gb/sec (4X NDR)", state="1: DOWN")
    nics = infiniband_ports(tmp_path)
    assert nics is not None
    assert (nics["bandwidth"], nics["count"]) == ("400 Gb/s", 4)
    path = tmp_path / "m.yaml"
    path.write_text(yaml.safe_dump({"nodes": [node("NVIDIA H200", nics=nics)]}))
    assert load_cluster(str(path)).nodes[0].nic_bytes_per_s_per_device == 200e9


class FakeNvmlError(Exception):
    pass


def fake_nvml(count: int, *, broken: bool = False) -> types.ModuleType:
    """A stand-in for pynvml on a machine with `count` H200s."""
    module = types.ModuleType("pynvml")

    def init() -> None:
        if broken:
            raise FakeNvmlError("no driver")

    def link_state(_: object, index: int) -> int:
        if index >= 18:
            raise FakeNvmlError
        return 1

    names: dict[str, Any] = {
        "NVMLError": FakeNvmlError,
        "nvmlInit": init,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: count,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda _: b"NVIDIA H200",
        "nvmlDeviceGetMemoryInfo": lambda _: types.SimpleNamespace(total=143771 * MIB),
        "nvmlDeviceGetNvLinkState": link_state,
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda _: 5,
        "nvmlSystemGetDriverVersion": lambda: "570.1",
    }
    for name, value in names.items():
        setattr(module, name, value)
    return module


def test_detection_asks_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(8))
    entry = detect_gpu_node()
    assert entry is not None
    assert entry["devices"]["type"] == "h200-sxm-141gb"
    assert entry["devices"]["count"] == 8
    assert entry["devices"]["memory"] == "143771 MiB"
    assert entry["intra"] == {"type": "nvswitch4"}


def test_without_driver_or_gpu_there_is_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(8, broken=True))
    assert detect_gpu_node() is None
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(0))
    assert detect_gpu_node() is None

    def absent(name: str) -> types.ModuleType:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    assert detect_gpu_node() is None
