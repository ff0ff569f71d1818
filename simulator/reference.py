"""The reference engine: the semantics of `task_graph`, in SimPy, to be read.

Each stream is a process that goes through its tasks; one network carries all flows. Whenever a
flow begins or ends, the network books what every flow has moved since the last change, lets those
that have nothing left go, shares its links anew and comes back when the next flow would end.
Slow and simple on purpose: `engine` must give the same nanoseconds.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy

from claw_plan.simulator.errors import SimulationError
from claw_plan.simulator.task_graph import WORK_UNITS_PER_BYTE, Int, TaskGraph, deadlock

Process = Generator[Any, Any, None]

_LAST_NS = int(np.iinfo(np.int64).max)


def finish_times_ns_reference(graph: TaskGraph) -> tuple[Int, Int]:
    """When each task takes its stream and when it finishes. Raises as `finish_times_ns` does."""
    env = simpy.Environment()
    network = _Network(env, graph.capacity.tolist())
    done = [env.event() for _ in range(len(graph))]
    start, finish = np.full(len(graph), -1), np.full(len(graph), -1)

    def run_stream(tasks: list[int]) -> Process:
        for task in tasks:
            needs = graph.need[graph.need_start[task] : graph.need_start[task + 1]]
            yield env.all_of([done[need] for need in needs])
            start[task] = env.now
            yield env.timeout(int(graph.delay_ns[task]))
            if graph.work_bytes[task]:
                yield network.transfer(_flow(graph, task, env.event()))
            if env.now >= _LAST_NS:
                raise SimulationError(
                    f"a step lasts at most {_LAST_NS} ns, but {graph.name[task]!r} ends later"
                )
            finish[task] = env.now
            done[task].succeed()

    for stream in range(len(graph.streams)):
        env.process(run_stream(np.flatnonzero(graph.stream == stream).tolist()))
    env.run()
    if (finish < 0).any():
        raise deadlock(graph, finish)
    return start, finish


@dataclass(eq=False, slots=True)
class _Flow:
    """A flow under way; a link that it crosses twice stands twice in `links`."""

    links: list[int]
    left: int
    cap: int
    finished: simpy.Event
    rate: int = 0


def _flow(graph: TaskGraph, task: int, finished: simpy.Event) -> _Flow:
    return _Flow(
        links=graph.link[graph.link_start[task] : graph.link_start[task + 1]].tolist(),
        left=int(graph.work_bytes[task]) * WORK_UNITS_PER_BYTE,
        cap=int(graph.rate_cap[task]),
        finished=finished,
    )


class _Network:
    """All links and the flows on them."""

    def __init__(self, env: simpy.Environment, capacity: list[int]) -> None:
        self._env = env
        self._capacity = capacity
        self._flows: list[_Flow] = []
        self._booked_ns = 0
        self._version = 0

    @property
    def _now_ns(self) -> int:
        return int(self._env.now)

    def transfer(self, flow: _Flow) -> simpy.Event:
        """Lets a flow begin; the event happens when it has moved its bytes."""
        self._book()
        self._flows.append(flow)
        self._share_anew()
        return flow.finished

    def _book(self) -> None:
        for flow in self._flows:
            flow.left -= flow.rate * (self._now_ns - self._booked_ns)
            if flow.left <= 0:
                flow.finished.succeed()
        self._flows = [flow for flow in self._flows if flow.left > 0]
        self._booked_ns = self._now_ns

    def _share_anew(self) -> None:
        share_max_min(self._flows, self._capacity)
        self._version += 1
        if self._flows:
            wait = min(-(-flow.left // flow.rate) for flow in self._flows)
            self._env.process(self._come_back(wait, self._version))

    def _come_back(self, wait: int, version: int) -> Process:
        yield self._env.timeout(wait)
        if version == self._version:  # no flow began or ended meanwhile
            self._book()
            self._share_anew()


def share_max_min(flows: list[_Flow], capacity: list[int]) -> None:
    """Sets all rates: they rise together until a link is full or a flow is at its cap."""
    free, rising = list(capacity), list(flows)
    while rising:
        crossings = [link for flow in rising for link in flow.links]
        level, scarce = min(
            (max(free[link] // crossings.count(link), 1), link) for link in set(crossings)
        )
        capped = [flow for flow in rising if flow.cap <= level]
        stopping = capped or [flow for flow in rising if scarce in flow.links]
        for flow in stopping:
            flow.rate = min(flow.cap, level)
            for link in flow.links:
                free[link] -= flow.rate
        rising = [flow for flow in rising if flow not in stopping]
