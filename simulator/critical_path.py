"""The chain of tasks that a simulated step's duration consists of.

Walked back from the task that ends last: each task starts when the last of what it waits for (its
stream's previous task, its needs) has finished. To make the step shorter, something on this chain
has to become shorter.
"""

from __future__ import annotations

import numpy as np

from claw_plan.simulator.task_graph import Int, TaskGraph


def critical_path(graph: TaskGraph, start_ns: Int, finish_ns: Int) -> list[int]:
    """The tasks of the chain in order of time; of several that end together the lowest id.

    `start_ns` and `finish_ns` are those of `engine.finish_times_ns`. Without tasks it is empty.
    """
    if not len(graph):
        return []
    before = _previous_on_stream(graph)
    task = int(np.argmax(finish_ns))
    chain = [task]
    while start_ns[task] > 0:
        needs = graph.need[graph.need_start[task] : graph.need_start[task + 1]].tolist()
        waits = [*needs, before[task]] if before[task] >= 0 else needs
        task = max(waits, key=lambda other: (int(finish_ns[other]), -other))
        chain.append(task)
    return chain[::-1]


def _previous_on_stream(graph: TaskGraph) -> list[int]:
    """For each task the one before it on its stream, -1 for the first."""
    order = np.argsort(graph.stream, kind="stable")
    before = np.full(len(graph), -1, dtype=np.int64)
    same = graph.stream[order[1:]] == graph.stream[order[:-1]]
    before[order[1:][same]] = order[:-1][same]
    found: list[int] = before.tolist()
    return found
