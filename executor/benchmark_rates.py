"""Measured times of collectives to the figures of a link: start, rate, and each one's own rate.

Lines  ns = start + bytes / rate  are fitted over the message sizes; bytes are those over one
rank's port, as `profiles.collective_cost` counts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from claw_plan.executor.benchmark_gloo import fit_line
from claw_plan.profiles.work import CollectiveWork

Samples = Mapping[CollectiveWork, tuple[int, ...]]


def undisturbed_ns(samples: tuple[int, ...]) -> float:
    """The lower quartile: other programs on the machine only ever add time."""
    return sorted(samples)[len(samples) // 4]


def moved_bytes(work: CollectiveWork) -> float:
    """Bytes over one rank's port. gloo's reduce_scatter moves as many as its all_reduce."""
    ranks = work.group_size
    part = (ranks - 1) / ranks
    if work.op == "all_reduce" or (work.op == "reduce_scatter" and work.backend == "gloo"):
        return 2 * part * work.bytes
    return part * work.bytes if work.op not in ("broadcast", "send") else float(work.bytes)


def link_figures(samples: Samples, source: str) -> dict[str, Any]:
    """Figures of the link that all these went over, as a cluster file has them.

    The nominal rate is the fastest transfer seen; `startup` is for gloo, whose model knows it.
    """
    by_op: dict[str, list[tuple[float, float]]] = {}
    for work, times in samples.items():
        by_op.setdefault(work.op, []).append((moved_bytes(work), undisturbed_ns(times)))
    lines = {op: fit_line(points) for op, points in by_op.items()}
    rates = {op: rate for op, (_, rate) in lines.items()}
    fastest = max(size * 1e9 / ns for points in by_op.values() for size, ns in points)
    starts = {op: max(1, round(start)) for op, (start, _) in lines.items()}
    sizes = sorted({work.bytes for work in samples})
    figures: dict[str, Any] = {
        "bandwidth": gigabytes_per_s(max(fastest, *rates.values())),
        "latency": f"{starts.get('send', min(starts.values()))} ns",
        "achieved": {op: gigabytes_per_s(rate) for op, rate in rates.items()},
        "source": f"{source}; the fastest transfer seen",
        "achieved_source": f"{source}; lines fitted over {sizes[0]} to {sizes[-1]} bytes",
    }
    if any(work.backend == "gloo" for work in samples):
        figures["startup"] = {op: f"{start} ns" for op, start in starts.items()}
    return figures


def gigabytes_per_s(rate: float) -> str:
    """A rate as a cluster file has it."""
    return f"{rate / 1e9:.4g} GB/s"
