"""What a GPU multiplies, copies and launches, and what its collectives cost within the node.

`claw-plan detect --benchmark` puts these figures in the place of the catalogue's. The timing
works on any torch device, so that its parts are tested on CPUs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from claw_plan.executor.benchmark_group import Samples, measure_group
from claw_plan.executor.benchmark_processes import measure_together
from claw_plan.executor.benchmark_rates import gigabytes_per_s, link_figures, undisturbed_ns
from claw_plan.profiles import catalogue
from claw_plan.profiles.measured_rate import difference, differs
from claw_plan.profiles.units import MIB

_SIZES = (2048, 4096, 8192)
_DTYPES = ("bfloat16", "float16", "float32")
_COPY_BYTES = 512 * MIB
_LAUNCHES = 1000
_REPEATS = 9
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """Sustained rates of one device, and the host's time to start a kernel."""

    flops_per_s: Mapping[str, float]
    copy_bytes_per_s: float
    launch_ns: int


def measure_device(
    device: torch.device,
    *,
    sizes: Sequence[int] = _SIZES,
    dtypes: Sequence[str] = _DTYPES,
    copy_bytes: int = _COPY_BYTES,
) -> DeviceRates:
    """Square products in each dtype, a copy in memory, and small kernels."""
    best: dict[str, float] = {}
    for dtype in dtypes:
        for size in sizes:
            left = torch.randn(size, size, device=device).to(getattr(torch, dtype))
            seconds = _seconds(lambda left=left: torch.mm(left, left), device)  # type: ignore[misc]
            best[dtype] = max(best.get(dtype, 0.0), 2 * size**3 / seconds)
    source = torch.zeros(copy_bytes // 4, device=device)
    target = torch.empty_like(source)
    copy = _seconds(lambda: target.copy_(source), device)
    one = torch.ones(1, device=device)

    def many() -> None:
        for _ in range(_LAUNCHES):
            one.add_(1.0)

    launch_ns = round(_seconds(many, device) * 1e9 / _LAUNCHES)
    return DeviceRates(
        flops_per_s=best, copy_bytes_per_s=2 * copy_bytes / copy, launch_ns=max(1, launch_ns)
    )


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    samples = []
    for index in range(_REPEATS + 2):
        _finish(device)
        start = time.perf_counter_ns()
        call()
        _finish(device)
        if index >= 2:
            samples.append(time.perf_counter_ns() - start)
    return undisturbed_ns(tuple(samples)) / 1e9


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_local_group(
    count: int, device_type: str = "cuda", sizes_bytes: Sequence[int] | None = None
) -> Samples:
    """Collectives among `count` devices of this host, one process each.

    Raises ExecutionError when a process fails or does not answer.
    """
    answers: list[Samples] = measure_together(
        _local_rank,
        count,
        (count, device_type, sizes_bytes),
        num_answers=1,
        timeout_s=_TIMEOUT_S,
        advice="does nvidia-smi or rocm-smi show another program on them?",
    )
    return answers[0]


def _local_rank(
    rank: int,
    store: str,
    count: int,
    device_type: str,
    sizes_bytes: Sequence[int] | None,
    answers: Any,
) -> None:
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        init_method=store,
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    samples = measure_group(range(count), device, nodes=1, sizes_bytes=sizes_bytes)
    if rank == 0:
        answers.put(samples)
    dist.barrier()
    dist.destroy_process_group()


def with_rates(
    node: Mapping[str, Any], rates: DeviceRates, group: Samples, source: str
) -> tuple[dict[str, Any], list[str]]:
    """The entry with measured figures, and what differs from the nominal ones."""
    entry, notes = dict(node), []
    devices = dict(entry["devices"])
    nominal = catalogue.device(str(devices["type"]))
    devices["achieved"] = {
        dtype: f"{rate / 1e12:.4g} TFLOPS" for dtype, rate in rates.flops_per_s.items()
    }
    devices["achieved_source"] = source
    devices["kernel_launch"] = f"{rates.launch_ns} ns"
    if differs(rates.copy_bytes_per_s, nominal.memory_bytes_per_s):
        devices["bandwidth"] = gigabytes_per_s(rates.copy_bytes_per_s)
        notes.append(
            difference(
                f"memory of {nominal.name}",
                rates.copy_bytes_per_s,
                nominal.memory_bytes_per_s,
                source,
            )
        )
    entry["devices"] = devices
    if group:
        intra = dict(entry["intra"])
        target = dict(intra.get("default", intra))
        figures = link_figures(group, source)
        name = target.get("type")
        rate = max(float(text.split()[0]) * 1e9 for text in figures["achieved"].values())
        known = catalogue.link(str(name))
        if differs(rate, known.bytes_per_s):
            notes.append(difference(f"link {name}", rate, known.bytes_per_s, source))
        kept = {key: figures[key] for key in ("latency", "achieved", "achieved_source")}
        if rate > known.bytes_per_s:
            kept["bandwidth"] = gigabytes_per_s(rate)
        target |= kept
        entry["intra"] = intra | {"default": target} if "default" in intra else target
    return entry, notes
