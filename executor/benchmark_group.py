"""What collectives cost in one process group, by operation and size, on CPUs or GPUs.

`measure_group` is called by all ranks of the group at once; `measure_replicas` is the short form
that a run makes after its last step. `measure_directions` times sends one way at a time, because a
network may be slower in one direction, and the slower one binds.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from claw_plan.profiles.units import NS_PER_S
from claw_plan.profiles.work import CollectiveWork

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
CPU_SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
GPU_SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 28)

REPLICA_OPS = ("all_reduce", "all_gather", "all_to_all", "send")
REPLICA_SIZES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
REPLICA_SECONDS = 1.0
"""What replicas may meet by, whatever they met by in a run, and how long each of it may be timed:
what was measured of one operation tells little of another, above all of small messages."""

_WARM_UPS = 2
_MIN_REPEATS = 5
_BYTES_A_SIZE = 5 << 24
_DIRECTION_BYTES = 1 << 23
_DIRECTION_REPEATS = 5

Samples = dict[CollectiveWork, tuple[int, ...]]


def measure_group(
    ranks: Sequence[int],
    device: torch.device,
    *,
    nodes: int,
    group: dist.ProcessGroup | None = None,
    ops: Sequence[str] = OPS,
    sizes_bytes: Sequence[int] | None = None,
    repeats: int = 20,
    seconds: float = math.inf,
) -> Samples:
    """Times of each operation at each size; every sample is the slowest rank's.

    `ranks` are the group's global ranks, among which this process is; `group` None is all. Of each
    operation the sizes that would take longer than `seconds` together are left out, the first not.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    sizes = sizes_bytes or (GPU_SIZES if device.type == "cuda" else CPU_SIZES)
    found: Samples = {}
    for op in ops:
        left_ns = seconds * NS_PER_S
        known: list[tuple[int, float]] = []
        for size in sizes:
            count = max(_MIN_REPEATS, min(repeats, _BYTES_A_SIZE // size))
            if (_WARM_UPS + count) * _expected_ns(size, known) > left_ns:
                break
            members = len(ranks) if op != "send" else 2
            work = CollectiveWork(
                op=op, bytes=size, group_size=members, nodes=min(nodes, members), backend=backend
            )
            call = _call(op, size, ranks, device, group)
            samples = _slowest(_time(call, count, device, group, op), device, group)
            found[work] = samples
            left_ns -= (_WARM_UPS + count) * statistics.mean(samples)
            known.append((size, statistics.mean(samples)))
    return found


def _expected_ns(size_bytes: int, known: Sequence[tuple[int, float]]) -> float:
    """What a size will take: it lies on the line of the two largest (size, ns) before it.

    One alone mostly waited, and the next waits as long.
    """
    if len(known) < 2:
        return sum(ns for _, ns in known)
    (small, small_ns), (large, large_ns) = known[-2:]
    of_byte_ns = max(0.0, large_ns - small_ns) / (large - small)
    return large_ns + of_byte_ns * (size_bytes - large)


def measure_replicas(ranks: Sequence[int], nodes: int, group: dist.ProcessGroup) -> Samples:
    """What gloo's operations take among replicas on several hosts, at a few sizes."""
    return measure_group(
        ranks,
        torch.device("cpu"),
        nodes=nodes,
        group=group,
        ops=REPLICA_OPS,
        sizes_bytes=REPLICA_SIZES,
        repeats=6,
        seconds=REPLICA_SECONDS,
    )


def _time(
    call: Callable[[], None],
    repeats: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
    op: str,
) -> list[int]:
    trips = 2 if op == "send" else 1  # there and back: one way only hands over
    samples = []
    for index in range(_WARM_UPS + repeats):
        dist.barrier(group)
        _finish(device)
        start_ns = time.perf_counter_ns()
        call()
        _finish(device)
        if index >= _WARM_UPS:
            samples.append((time.perf_counter_ns() - start_ns) // trips)
    return samples


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(
    samples: list[int], device: torch.device, group: dist.ProcessGroup | None
) -> tuple[int, ...]:
    times = torch.tensor(samples, dtype=torch.int64, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    return tuple(int(sample) for sample in times.tolist())


def _call(
    op: str,
    size_bytes: int,
    ranks: Sequence[int],
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> Callable[[], None]:
    """The operation on a full buffer of that size, as `CollectiveWork` counts it."""
    members = len(ranks)
    part = torch.zeros(max(1, size_bytes // 4 // members), device=device)
    full = torch.zeros(part.numel() * members, device=device)
    other = torch.zeros_like(full)
    if op == "all_reduce":
        return lambda: dist.all_reduce(full, group=group)
    if op == "broadcast":
        return lambda: dist.broadcast(full, src=ranks[0], group=group)
    if op == "all_to_all":
        return lambda: dist.all_to_all_single(other, full, group=group)
    if op == "all_gather":
        return lambda: dist.all_gather_single(full, part, group=group)
    if op == "reduce_scatter":
        return lambda: dist.reduce_scatter_single(part, full, group=group)
    place = ranks.index(dist.get_rank())

    def there_and_back() -> None:
        if place == 0:
            dist.send(full, ranks[1], group=group)
            dist.recv(full, ranks[1], group=group)
        elif place == 1:
            dist.recv(full, ranks[0], group=group)
            dist.send(full, ranks[0], group=group)

    return there_and_back


def measure_directions(rank: int, world_size: int) -> dict[tuple[int, int], float]:
    """Bytes per second from each rank to each other one, on CPU tensors; all ranks get all.

    A stream of sends is timed until the receiver's word that all came.
    """
    rates = torch.zeros(world_size, world_size, dtype=torch.float64)
    for source in range(world_size):
        for target in range(world_size):
            if source != target:
                dist.barrier()
                seconds = _one_way(rank, source, target)
                if seconds:
                    rates[source, target] = _DIRECTION_REPEATS * _DIRECTION_BYTES / seconds
    dist.all_reduce(rates)
    return {
        (source, target): float(rates[source, target])
        for source in range(world_size)
        for target in range(world_size)
        if source != target
    }


def _one_way(rank: int, source: int, target: int) -> float:
    """Seconds that the stream took, at its source; 0 elsewhere."""
    if rank not in (source, target):
        return 0.0
    data, word = torch.zeros(_DIRECTION_BYTES // 4), torch.zeros(1)
    start = 0.0
    for index in range(_DIRECTION_REPEATS + 1):
        if index == 1:  # the first one only opens the way
            start = time.perf_counter()
        if rank == source:
            dist.send(data, target)
            dist.recv(word, target)
        else:
            dist.recv(data, source)
            dist.send(word, source)
    return time.perf_counter() - start if rank == source else 0.0
