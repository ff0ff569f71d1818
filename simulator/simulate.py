"""A `TaskGraph` becomes a SIMULATED `Timeline`: a span per task, and the memory of every rank.

`makespan_ns` gives the step time alone and is what the search calls; the Timeline is made for the
plans that people look at.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from claw_plan.simulator.engine import finish_times_ns
from claw_plan.simulator.task_graph import Int, TaskGraph
from claw_plan.simulator.timeline import SIMULATED, MemorySample, Span, Timeline


def makespan_ns(graph: TaskGraph) -> int:
    """When the last task finishes. Raises Deadlock or SimulationError as the engine does."""
    _, finish = finish_times_ns(graph)
    return int(finish.max(initial=0))


def simulate(graph: TaskGraph) -> Timeline:
    """Plays the graph; spans are ordered by start, then task."""
    return timeline_of(graph, *finish_times_ns(graph))


def timeline_of(graph: TaskGraph, start: Int, finish: Int) -> Timeline:
    """The Timeline of a graph whose tasks start and finish then."""
    spans = tuple(
        Span(
            rank=graph.ranks[graph.stream[task]],
            stream=graph.streams[graph.stream[task]],
            kind=graph.kind[task],
            name=graph.name[task],
            start_ns=int(start[task]),
            end_ns=int(finish[task]),
            cost_source=graph.cost_source[task],
        )
        for task in np.argsort(start, kind="stable").tolist()
    )
    return Timeline(origin=SIMULATED, spans=spans, memory=_memory(graph, start, finish))


def _memory(graph: TaskGraph, start: Int, finish: Int) -> tuple[MemorySample, ...]:
    """Samples per rank by time: after the last change of an instant, and at a peak in it."""
    samples: list[MemorySample] = []
    events = _memory_events(graph, start, finish)
    rank, used = -1, 0
    for event, following in zip_longest(events, events[1:]):
        used = used + event.change_bytes if event.rank == rank else event.change_bytes
        rank = event.rank
        goes_on = following is not None and following[:2] == event[:2]
        peak = following is not None and event.change_bytes > 0 > following.change_bytes
        if peak or not goes_on:
            samples.append(MemorySample(rank=rank, time_ns=event.time_ns, bytes=used))
    return tuple(samples)


class _MemoryEvent(NamedTuple):
    rank: int
    time_ns: int
    place: int
    change_bytes: int


def _memory_events(graph: TaskGraph, start: Int, finish: Int) -> list[_MemoryEvent]:
    """All changes by rank and time.

    At one instant what ends is freed first, then what begins is allocated, in order of task. A
    task that lasts no time allocates and frees at its turn, so that its peak is seen.
    """
    events = []
    for task in np.flatnonzero(graph.alloc_bytes).tolist():
        rank, change = graph.ranks[graph.stream[task]], int(graph.alloc_bytes[task])
        events.append(_MemoryEvent(rank, int(start[task]), 2 * task, change))
    for task in np.flatnonzero(graph.free_bytes).tolist():
        rank, change = graph.ranks[graph.stream[task]], -int(graph.free_bytes[task])
        place = 2 * task + 1 if start[task] == finish[task] else -1
        events.append(_MemoryEvent(rank, int(finish[task]), place, change))
    return sorted(events)
