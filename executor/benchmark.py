"""This machine, measured: the content of a cluster.yaml, and Measurements for its profile.

`claw-plan detect` calls `measure_machine`. GPUs are named through NVML and take their figures from
the catalogue; a machine without GPUs is measured as a CPU node: what one core multiplies, copies
and launches, and what gloo costs between two processes.
"""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from claw_plan.executor.benchmark_device import measure_device, measure_local_group, with_rates
from claw_plan.executor.benchmark_gloo import Samples, measure_gloo
from claw_plan.executor.benchmark_gpu import detect_gpu_node
from claw_plan.executor.benchmark_rates import gigabytes_per_s, link_figures, undisturbed_ns
from claw_plan.executor.detect_topology import local_reading, refined, rocm_node
from claw_plan.profiles.cluster_file import MIN_CPU_DEVICES, this_machine
from claw_plan.profiles.measurement import Measurement
from claw_plan.profiles.profile import link_device
from claw_plan.profiles.units import MIB
from claw_plan.profiles.work import DTYPE_BYTES, OpWork

CPU_DEVICE = "cpu-core"
LOOPBACK = "loopback"

_GEMM_SIZES = (256, 512, 1024)
_GEMM_DTYPES = ("float32", "float64", "bfloat16", "float16")
_SLOW_NS = 40_000_000
"""A product that takes longer is not repeated at the next size, which has eight times the work."""

_COPY_BYTES = 64 * MIB
"""Larger than the caches, so that memory is measured."""

_LAUNCHES = 2000
_REPEATS = 7

Progress = Callable[[str], None]


def measure_machine(
    progress: Progress | None = None, *, benchmark: bool = False
) -> tuple[Mapping[str, Any], list[Measurement]]:
    """A cluster file's content for this machine, and what was measured on the way.

    CPUs are always measured, in about 10 s, GPUs only with `benchmark`. `progress` hears what is
    being measured. Raises ExecutionError for GPUs that nobody described, or when processes cannot
    reach each other.
    """
    say = progress or (lambda _: None)
    say("looking for GPUs")
    found = detect_gpu_node()
    gpus = rocm_node() if found is None else refined(found, local_reading())
    if gpus is not None:
        measurements: list[Measurement] = []
        if benchmark:
            say("measuring the GPUs")
            gpus, measurements = measure_gpus(gpus)
        return {"name": platform.node() or "this-machine", "nodes": [gpus]}, measurements
    say("measuring one core")
    with _one_thread():
        ops = [*measure_gemms(), measure_attention()]
        copy_bytes_per_s = measure_copy()
        launch_ns = measure_launch()
    say("measuring gloo between two processes")
    gloo = measure_gloo()
    provenance = _provenance()
    measurements = [
        Measurement(device=CPU_DEVICE, work=work, samples_ns=samples, provenance=provenance)
        for work, samples in ops
    ]
    measurements += [
        Measurement(
            device=link_device(CPU_DEVICE, LOOPBACK),
            work=work,
            samples_ns=samples,
            ranks_per_host=work.group_size,
            provenance=provenance,
        )
        for work, samples in gloo.items()
    ]
    return cpu_cluster(ops, copy_bytes_per_s, launch_ns, gloo, provenance), measurements


def measure_gpus(node: Mapping[str, Any]) -> tuple[dict[str, Any], list[Measurement]]:
    """The entry of this machine's GPUs with measured figures, and the measurements."""
    count, provenance = int(node["devices"]["count"]), _provenance()
    rates = measure_device(torch.device("cuda", 0))
    group = measure_local_group(count) if count > 1 else {}
    source = f"measured on {provenance['when']} with torch {provenance['torch']}"
    entry, notes = with_rates(node, rates, group, source)
    link = entry["intra"].get("default", entry["intra"]).get("type", "custom")
    device = link_device(str(entry["devices"]["type"]), str(link))
    texts = [text for text in (entry.get("source"), *notes) if text]
    if texts:
        entry["source"] = "; ".join(texts)
    return entry, [
        Measurement(
            device=device,
            work=work,
            samples_ns=samples,
            ranks_per_host=work.group_size,
            provenance=provenance,
        )
        for work, samples in group.items()
    ]


def _provenance() -> Mapping[str, str]:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    return {"when": now, "torch": torch.__version__, "command": "claw-plan detect"}


@contextmanager
def _one_thread() -> Iterator[None]:
    """One rank has one core, so its kernels have one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


OpSamples = tuple[OpWork, tuple[int, ...]]


def _sample(call: Callable[[], object], repeats: int = _REPEATS) -> tuple[int, ...]:
    call()
    samples = []
    for _ in range(repeats):
        start_ns = time.perf_counter_ns()
        call()
        samples.append(time.perf_counter_ns() - start_ns)
        if samples[-1] > _SLOW_NS:
            break
    return tuple(samples)


def measure_gemms() -> list[OpSamples]:
    """Square products in every dtype, up to the size where they become slow."""
    found: list[OpSamples] = []
    for dtype in _GEMM_DTYPES:
        for size in _GEMM_SIZES:
            left = torch.randn(size, size).to(getattr(torch, dtype))
            right = torch.randn(size, size).to(getattr(torch, dtype))
            samples = _sample(lambda left=left, right=right: torch.mm(left, right))  # type: ignore[misc]
            work = OpWork(
                kind="gemm",
                dims=(1, size, size, size),
                dtype=dtype,
                flops=2 * size**3,
                bytes=3 * size * size * DTYPE_BYTES[dtype],
                target="aten.mm.default",
            )
            found.append((work, samples))
            if min(samples) > _SLOW_NS:
                break
    return found


def measure_attention() -> OpSamples:
    """Causal attention of a small GPT's shape."""
    batch, heads, length, size = 4, 6, 256, 64
    query = torch.randn(batch, heads, length, size)
    samples = _sample(lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True))
    work = OpWork(
        kind="attention",
        dims=(batch, heads, heads, length, length, size, 1),
        dtype="float32",
        flops=4 * batch * heads * length * length * size,
        bytes=4 * query.numel() * 4,
        target="attention",
    )
    return work, samples


def measure_copy() -> float:
    """Bytes read and written per second by one core."""
    source = torch.zeros(_COPY_BYTES // 4)
    target = torch.empty_like(source)
    samples = _sample(lambda: target.copy_(source))
    return 2 * _COPY_BYTES * 1e9 / undisturbed_ns(samples)


def measure_launch() -> int:
    """Time of a kernel with next to nothing to do, in ns."""
    one = torch.ones(1)

    def many() -> None:
        for _ in range(_LAUNCHES):
            one.add_(1.0)

    return max(1, round(undisturbed_ns(_sample(many)) / _LAUNCHES))


def cpu_cluster(
    ops: list[OpSamples],
    copy_bytes_per_s: float,
    launch_ns: int,
    gloo: Samples,
    provenance: Mapping[str, str],
) -> Mapping[str, Any]:
    """The measured figures as a cluster file."""
    cores, memory = this_machine()
    source = f"measured on {provenance['when']} with torch {provenance['torch']}, one thread"
    best: dict[str, float] = {}
    sustained: dict[str, float] = {}
    for work, samples in ops:
        rate = work.flops * 1e9 / undisturbed_ns(samples)
        if work.kind == "attention":
            sustained["attention"] = rate / 2  # the causal half counts
        else:
            best[work.dtype] = max(best.get(work.dtype, 0.0), work.flops * 1e9 / min(samples))
            sustained[work.dtype] = max(sustained.get(work.dtype, 0.0), rate)
    devices = {
        "type": "cpu",
        "cores": cores,
        "count": max(MIN_CPU_DEVICES, cores),
        "bandwidth": gigabytes_per_s(copy_bytes_per_s),
        "peak": {dtype: _gigaflops(rate) for dtype, rate in best.items()},
        "achieved": {name: _gigaflops(rate) for name, rate in sustained.items()},
        "kernel_launch": f"{launch_ns} ns",
        "source": f"{source}; peak is the fastest product seen, bandwidth a copy of 64 MiB",
        "achieved_source": f"{source}; lower quartile of the best size",
    }
    node = {
        "count": 1,
        "devices": devices,
        "intra": {"type": LOOPBACK} | link_figures(gloo, f"gloo between two processes, {source}"),
        "host": {"memory": f"{memory // MIB} MiB", "cores": cores},
    }
    return {"name": "this-machine", "nodes": [node]}


def _gigaflops(rate: float) -> str:
    return f"{rate / 1e9:.4g} GFLOPS"
