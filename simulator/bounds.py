"""A lower bound on what a `TaskGraph` will take, without simulating its contention.

Two facts hold whatever the sharing does, and the bound is the larger:

- No task ends before its needs, the tasks ahead of it on its stream, its delay, and its flow at
  the rate it would have alone. The longest such chain also covers the work of each stream.
- No link moves more bytes than its capacity allows.

Both are in the engines' own integers, so the bound is never above the simulated makespan, and
equals it where no two flows meet.
"""

from __future__ import annotations

import numpy as np

from claw_plan.simulator.engine import compiled
from claw_plan.simulator.task_graph import WORK_UNITS_PER_BYTE, Int, TaskGraph


def lower_bound_ns(graph: TaskGraph) -> int:
    """Nanoseconds that the graph takes at least; 0 for an empty one."""
    if not len(graph):
        return 0
    alone_ns = uncontended_ns(graph)
    path = _longest_path(graph.stream, alone_ns, graph.need_start, graph.need, len(graph.streams))
    return max(int(path), _busiest_link_ns(graph))


def uncontended_ns(graph: TaskGraph) -> Int:
    """What each task takes when it is alone: its delay, then its flow at its cap or its links'.

    Saturates where it leaves 64 bits (with a simulation that raises).
    """
    rate = graph.rate_cap.copy()
    owner = np.repeat(np.arange(len(graph)), np.diff(graph.link_start))
    links = max(1, len(graph.links))
    pairs, crossings = np.unique(owner * links + graph.link, return_counts=True)
    most = np.maximum(graph.capacity[pairs % links] // crossings, 1)
    np.minimum.at(rate, pairs // links, most)
    flow_ns = -(-graph.work_bytes * WORK_UNITS_PER_BYTE // np.maximum(rate, 1))
    room = np.iinfo(np.int64).max - flow_ns
    return np.minimum(graph.delay_ns, room) + flow_ns


@compiled
def _longest_path(stream: Int, alone_ns: Int, need_start: Int, need: Int, streams: int) -> int:
    """The latest finish if nothing is shared. Needs of later tasks, a deadlock, count as met."""
    finish_ns = np.zeros(stream.size, np.int64)
    free_ns = np.zeros(streams, np.int64)
    latest = 0
    for task in range(stream.size):
        ready = free_ns[stream[task]]
        for edge in range(need_start[task], need_start[task + 1]):
            ready = max(ready, finish_ns[need[edge]])
        limit = np.iinfo(np.int64).max - ready
        finish_ns[task] = ready + min(alone_ns[task], limit)
        free_ns[stream[task]] = finish_ns[task]
        latest = max(latest, finish_ns[task])
    return latest


def _busiest_link_ns(graph: TaskGraph) -> int:
    """The most work on one link over what the link can do.

    A rate is at least one unit, so a link of fewer units than flows is overdrawn: it does as many
    units as flows may be on it at once, and these are no more than cross it in all.
    """
    crossed = np.zeros(len(graph.links), np.int64)
    moved_bytes = np.zeros(len(graph.links), np.int64)
    np.add.at(crossed, graph.link, 1)
    np.add.at(moved_bytes, graph.link, np.repeat(graph.work_bytes, np.diff(graph.link_start)))
    rates = np.maximum(graph.capacity, crossed)
    return max(
        (
            -(-int(moved) * WORK_UNITS_PER_BYTE // int(rate))
            for moved, rate in zip(moved_bytes, rates, strict=True)
        ),
        default=0,
    )
