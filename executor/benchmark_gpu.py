"""The GPUs of this machine, as NVML sees them, to one entry of a cluster.yaml."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from claw_plan.executor.errors import ExecutionError
from claw_plan.profiles.cluster_file import this_machine
from claw_plan.profiles.device_names import catalogue_name
from claw_plan.profiles.units import MIB

_SWITCHES = {"a100": "nvswitch3", "h100": "nvswitch4", "h200": "nvswitch4"}
_SWITCHES |= {"b200": "nvswitch5", "gb200": "nvswitch5-nvl72", "v100": "nvlink2-mesh"}
_MAX_NVLINKS = 18
_INFINIBAND = Path("/sys/class/infiniband")
_NIC_LATENCY = "16 us"
"""Of the catalogue's RDMA links."""


def detect_gpu_node() -> Mapping[str, Any] | None:
    """The node's entry; None without NVML or without a GPU.

    Raises ExecutionError for GPUs that the catalogue does not know, or that differ.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        count = nvml.nvmlDeviceGetCount()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        if not handles:
            return None
        return gpu_node(
            names=[_text(nvml.nvmlDeviceGetName(handle)) for handle in handles],
            memory_bytes=min(int(nvml.nvmlDeviceGetMemoryInfo(h).total) for h in handles),
            nvlinks=min(_active_nvlinks(nvml, handle) for handle in handles),
            pcie_generation=min(nvml.nvmlDeviceGetMaxPcieLinkGeneration(h) for h in handles),
            nics=infiniband_ports(_INFINIBAND),
            source=f"NVML, driver {_text(nvml.nvmlSystemGetDriverVersion())}",
        )
    finally:
        nvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _active_nvlinks(nvml: Any, handle: Any) -> int:
    active = 0
    for index in range(_MAX_NVLINKS):
        try:
            active += bool(nvml.nvmlDeviceGetNvLinkState(handle, index))
        except nvml.NVMLError:
            break  # this device has fewer
    return active


def gpu_node(
    *,
    names: Sequence[str],
    memory_bytes: int,
    nvlinks: int,
    pcie_generation: int,
    nics: Mapping[str, Any] | None,
    source: str,
) -> Mapping[str, Any]:
    """One entry of `nodes:`, from what the driver says of the GPUs."""
    if len(set(names)) > 1:
        raise ExecutionError(
            f"this machine mixes GPUs ({', '.join(sorted(set(names)))}); write a cluster.yaml "
            "with one entry of `nodes` for each kind"
        )
    device = catalogue_name(names[0])
    if device is None:
        raise ExecutionError(
            f"the GPU {names[0]!r} is not in the catalogue; write a cluster.yaml with "
            "devices: {type: custom, memory: ..., bandwidth: ..., peak: {bfloat16: ...}}"
        )
    cores, host_memory = this_machine()
    devices = {"type": device, "count": len(names), "memory": f"{memory_bytes // MIB} MiB"}
    node: dict[str, Any] = {
        "count": 1,
        "devices": devices | {"source": f"memory: {source}; rates: the catalogue"},
        "intra": {"type": _intra(device, nvlinks, pcie_generation)},
    }
    if nics is not None:
        node["nics"] = nics
    return node | {"host": {"memory": f"{host_memory // MIB} MiB", "cores": cores}}


def _intra(device: str, nvlinks: int, pcie_generation: int) -> str:
    family = device.partition("-")[0]
    if nvlinks and "-pcie-" not in device and family in _SWITCHES:
        return _SWITCHES[family]
    if nvlinks:
        return f"nvlink{'4' if family == 'h100' else '3'} x{nvlinks}"
    return f"pcie{min(5, max(3, pcie_generation))}-x16"


def infiniband_ports(folder: Path) -> Mapping[str, Any] | None:
    """The fastest active RDMA ports as `nics:`; None where there is none."""
    rates: list[tuple[int, str]] = []
    for port in sorted(folder.glob("*/ports/*")):
        try:
            rate = (port / "rate").read_text(encoding="ascii")
            state = (port / "state").read_text(encoding="ascii")
            layer = (port / "link_layer").read_text(encoding="ascii").strip()
        except OSError:
            continue  # a port that the container may not look at
        match = re.match(r"(\d+) Gb/sec", rate)
        if match and "ACTIVE" in state:
            rates.append((int(match[1]), layer))
    if not rates:
        return None
    fastest = max(rates)
    return {
        "name": f"{fastest[1].lower()}-{fastest[0]}",
        "bandwidth": f"{fastest[0]} Gb/s",
        "latency": _NIC_LATENCY,
        "count": rates.count(fastest),
        "source": f"{_INFINIBAND}; latency assumed",
    }
