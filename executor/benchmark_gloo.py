"""What gloo costs between two processes of this machine: Measurements by collective and size."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from claw_plan.executor.benchmark_processes import measure_together
from claw_plan.profiles.work import CollectiveWork

GLOO_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
SIZES_BYTES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
RANKS = 2

_WARM_UPS = 2
_MIN_REPEATS = 5
_BYTES_PER_SIZE = 5 << 24
_TIMEOUT_S = 90.0

Samples = dict[CollectiveWork, tuple[int, ...]]


def measure_gloo(
    ops: Sequence[str] = GLOO_OPS, sizes_bytes: Sequence[int] = SIZES_BYTES, repeats: int = 40
) -> Samples:
    """Times of every collective at every size, each sample the slower rank's.

    Raises ExecutionError when the processes fail or do not answer.
    """
    by_rank: list[Samples] = measure_together(
        _rank,
        RANKS,
        (tuple(ops), tuple(sizes_bytes), repeats),
        num_answers=RANKS,
        timeout_s=_TIMEOUT_S,
        advice="is GLOO_SOCKET_IFNAME set to an interface that exists?",
    )
    return {
        work: tuple(max(pair) for pair in zip(samples, by_rank[1][work], strict=True))
        for work, samples in by_rank[0].items()
    }


def _rank(
    rank: int,
    store: str,
    ops: Sequence[str],
    sizes_bytes: Sequence[int],
    repeats: int,
    answers: Any,
) -> None:
    """One of the two processes."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    _pin(rank)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    samples: Samples = {}
    for op in ops:
        for size in sizes_bytes:
            work = CollectiveWork(op=op, bytes=size, group_size=RANKS, nodes=1, backend="gloo")
            count = max(_MIN_REPEATS, min(repeats, _BYTES_PER_SIZE // size))
            samples[work] = _time(_call(op, size, rank), count, op)
    answers.put(samples)
    dist.barrier()
    dist.destroy_process_group()


def _pin(rank: int) -> None:
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def _time(call: Callable[[], None], repeats: int, op: str) -> tuple[int, ...]:
    # A send is timed there and back: one way alone would only time the hand-over to gloo.
    trips = 2 if op == "send" else 1
    samples = []
    for index in range(_WARM_UPS + repeats):
        dist.barrier()
        start_ns = time.perf_counter_ns()
        call()
        if index >= _WARM_UPS:
            samples.append((time.perf_counter_ns() - start_ns) // trips)
    return tuple(samples)


def _call(op: str, size_bytes: int, rank: int) -> Callable[[], None]:
    """The collective on a full buffer of that size, as `CollectiveWork` counts it."""
    full = torch.zeros(max(RANKS, size_bytes // 4))
    part = torch.zeros(full.numel() // RANKS)
    other = torch.zeros_like(full)
    if op == "all_reduce":
        return lambda: dist.all_reduce(full)
    if op == "broadcast":
        return lambda: dist.broadcast(full, src=0)
    if op == "all_to_all":
        return lambda: dist.all_to_all_single(other, full)
    if op == "all_gather":
        return lambda: dist.all_gather_single(full, part)
    if op == "reduce_scatter":
        return lambda: dist.reduce_scatter_single(part, full)
    peer = 1 - rank

    def there_and_back() -> None:
        if rank == 0:
            dist.send(full, peer)
            dist.recv(full, peer)
        else:
            dist.recv(full, peer)
            dist.send(full, peer)

    return there_and_back


def fit_line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Start in ns and rate in bytes per s of  ns = start + bytes / rate.

    Least squares of relative errors. Noise may tilt the line below zero at its start; then half
    of what the smallest message took beyond its bytes at the best rate is kept as the start.
    """
    pairs = sorted(points)
    sizes = np.array([size for size, _ in pairs], dtype=np.float64)
    times = np.array([ns for _, ns in pairs], dtype=np.float64)
    best_slope = float((times / sizes).min())
    floor = max(1.0, 0.5 * (float(times[0]) - float(sizes[0]) * best_slope))
    rows = np.stack([1.0 / times, sizes / times], axis=1)
    start, slope = np.linalg.lstsq(rows, np.ones(len(pairs)), rcond=None)[0]
    if start < floor or slope <= 0:
        start = floor
        per_byte = sizes / times
        slope = float((per_byte @ (1.0 - start / times)) / (per_byte @ per_byte))
    return float(start), 1e9 / max(float(slope), 1e-3 * best_slope)
