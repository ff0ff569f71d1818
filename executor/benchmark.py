"""This machine, measured: the content of a cluster.yaml, and Measurements for its profile.

`claw-plan detect` calls `measure_machine`. GPUs are named through NVML and take their figures from
the catalogue; a machine without GPUs is measured as a CPU node: what one core multiplies, copies
and launches, and what gloo costs between two processes.
"""

from __future__ import annotations

import importlib
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from claw_plan.executor.benchmark_gloo import Sample, fit_line, measure_gloo
from claw_plan.profiles import catalogue
from claw_plan.profiles.cluster_file import MIN_CPU_DEVICES, this_machine
from claw_plan.profiles.measurement import Measurement
from claw_plan.profiles.profile import link_device
from claw_plan.profiles.units import MIB
from claw_plan.profiles.work import CollectiveWork, OpWork

CPU_DEVICE = "cpu-core"
LOOPBACK = "loopback"

_GEMM_SIZES = (256, 512, 1024)
_GEMM_DTYPES = ("float32", "float64", "bfloat16", "float16")
_SLOW_GEMM_S = 0.05
"""A product of this size is not repeated at the next one, which has eight times the work."""

_COPY_BYTES = 64 * MIB
"""Larger than the caches, so that memory is measured."""

Progress = Callable[[str], None]
Provenance = Mapping[str, str]


def measure_machine(
    progress: Progress | None = None,
) -> tuple[Mapping[str, Any], list[Measurement]]:
    """A cluster file's content for this machine, and what was measured on the way.

    Takes about 15 s on CPUs. `progress` hears what is being measured. Raises ExecutionError when
    two processes cannot reach each other.
    """
    say = progress or (lambda _: None)
    say("looking for GPUs")
    gpus = detect_gpus()
    if gpus is not None:
        return gpus, []
    return _measure_cpu(say)


# --- GPUs ---------------------------------------------------------------------------------------


def detect_gpus() -> Mapping[str, Any] | None:
    """The node as NVML sees it; None without NVML or without a GPU."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001  # pynvml's errors have no common base outside of itself
        return None
    try:
        count = nvml.nvmlDeviceGetCount()
        if not count:
            return None
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        names = [_text(nvml.nvmlDeviceGetName(handle)) for handle in handles]
        memory = min(int(nvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles)
        nvlinks = min(_active_nvlinks(nvml, handle) for handle in handles)
        driver = _text(nvml.nvmlSystemGetDriverVersion())
    finally:
        nvml.nvmlShutdown()
    return gpu_node(names, memory, nvlinks, driver, infiniband_rates())


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _active_nvlinks(nvml: Any, handle: Any) -> int:
    active = 0
    for index in range(18):
        try:
            active += bool(nvml.nvmlDeviceGetNvLinkState(handle, index))
        except nvml.NVMLError:
            break
    return active
