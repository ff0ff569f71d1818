"""Tasks per second of both engines, alone and with flows that meet; their answers are compared.

Run: python bench/engine.py [--tasks 1000000]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from claw_plan.simulator.bounds import lower_bound_ns
from claw_plan.simulator.engine import finish_times_ns
from claw_plan.simulator.reference import finish_times_ns_reference
from claw_plan.simulator.task_graph import Int, TaskGraph

Engine = Callable[[TaskGraph], tuple[Int, Int]]


def graph_of(
    stream: Int, delay_ns: Int, needs: Int, work: Int, links: Int, capacity: Int
) -> TaskGraph:
    """A graph from arrays: row i of `needs` and `links` belongs to task i, -1 pads."""
    tasks = len(stream)
    labels = ("other",) * tasks
    return TaskGraph(
        streams=tuple(map(str, range(int(stream.max()) + 1))),
        ranks=tuple(range(int(stream.max()) + 1)),
        links=tuple(map(str, range(len(capacity)))),
        stream=stream,
        delay_ns=delay_ns,
        work_bytes=work,
        rate_cap=np.full(tasks, 10**9),
        link_start=np.concatenate([[0], np.cumsum((links >= 0).sum(axis=1))]),
        link=links[links >= 0],
        need_start=np.concatenate([[0], np.cumsum((needs >= 0).sum(axis=1))]),
        need=needs[needs >= 0],
        capacity=capacity,
        alloc_bytes=np.zeros(tasks, np.int64),
        free_bytes=np.zeros(tasks, np.int64),
        kind=labels,
        name=labels,
        cost_source=labels,
    )


def uncontended(tasks: int, streams: int) -> TaskGraph:
    """Delays on `streams` streams, each with up to two needs among the 100 tasks before it."""
    rng = np.random.default_rng(0)
    back = rng.integers(1, 100, (tasks, 2))
    needs = np.where(rng.random((tasks, 2)) < 0.5, np.arange(tasks)[:, None] - back, -1)
    return graph_of(
        rng.integers(0, streams, tasks),
        rng.integers(1, 100_000, tasks),
        needs.clip(min=-1),
        np.zeros(tasks, np.int64),
        np.full((tasks, 1), -1),
        np.ones(1, np.int64),
    )


def contended(tasks: int, flows: int, links: int) -> TaskGraph:
    """Independent collectives over three links each; nearly always `flows` are under way."""
    rng = np.random.default_rng(0)
    return graph_of(
        np.arange(tasks) % flows,
        rng.integers(1, 1000, tasks),
        np.full((tasks, 1), -1),
        rng.integers(10_000, 1_000_000, tasks),
        np.array([rng.permutation(links)[:3] for _ in range(tasks)]),
        np.full(links, 10**9),
    )


def tasks_per_s(engine: Engine, graph: TaskGraph, runs: int) -> float:
    """Median over the runs."""
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        engine(graph)
        seconds.append(time.perf_counter() - start)
    return len(graph) / statistics.median(seconds)


def compare(label: str, large: TaskGraph, small: TaskGraph) -> None:
    """One line: both rates, their ratio, and how close the bound is. Raises if they disagree."""
    for ours, theirs in zip(finish_times_ns(small), finish_times_ns_reference(small), strict=True):
        if not np.array_equal(ours, theirs):
            raise SystemExit(f"{label}: the engines disagree")
    compiled, readable = (
        tasks_per_s(finish_times_ns, large, 5),
        tasks_per_s(finish_times_ns_reference, small, 1),
    )
    start = time.perf_counter()
    bound = lower_bound_ns(large)
    bounded = len(large) / (time.perf_counter() - start)
    tight = bound / int(finish_times_ns(large)[1].max())
    print(
        f"{label:36s} {compiled:12,.0f} {readable:10,.0f} {compiled / readable:7,.0f} "
        f"{bounded:12,.0f} {tight:7.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=1_000_000, help="of the uncontended graphs")
    tasks = parser.parse_args().tasks
    start = time.perf_counter()
    lower_bound_ns(contended(10, 2, 4)), finish_times_ns(contended(10, 2, 4))
    print(f"first call (compiles, or loads what was kept): {time.perf_counter() - start:.2f} s")
    print(
        f"{'tasks per second':36s} {'compiled':>12s} {'SimPy':>10s} {'ratio':>7s} {'bound':>12s} "
        f"{'b/sim':>7s}"
    )
    for streams in (8, 32, 64, 256):
        label = f"uncontended, {streams} streams"
        compare(label, uncontended(tasks, streams), uncontended(10_000, streams))
    cases = (
        (2, 4, 5000, 100_000),
        (8, 8, 3000, 50_000),
        (32, 32, 500, 20_000),
        (128, 64, 300, 5000),
    )
    for flows, links, few, many in cases:
        label = f"{flows} flows over {links} links"
        compare(label, contended(many, flows, links), contended(few, flows, links))


if __name__ == "__main__":
    main()
