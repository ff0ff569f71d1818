"""`TaskGraph`: tasks on streams, flows on links, and what each waits for.

Semantics (both engines):

- A *stream* runs its tasks one at a time, in the order they were added.
- A task starts when its stream is free and all tasks it `needs` have finished. It first holds
  its stream for `delay_ns`, then, if it has `work_bytes`, for one *flow*.
- A flow moves `work_bytes` over each of its `links` at one rate, never above its `rate_cap`.
  Links are shared max-min: all rates rise together until a link is full or a flow is at its cap;
  of equally scarce links the lower index is filled first.
- A link that a flow names twice carries its bytes twice.
- Rates are whole units of 100 bytes/s and at least one; completions round up to a nanosecond.

A computation that shares something (CPU cores) is a flow over a link too: its bytes are
nanoseconds of work, its link the cores.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence, Sized
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from claw_plan.simulator.errors import Deadlock, SimulationError

RATE_UNIT_BYTES_PER_S = 100
"""One unit of rate. At 1 GB/s its rounding costs 1e-7."""

WORK_UNITS_PER_BYTE = 10**9 // RATE_UNIT_BYTES_PER_S
"""One unit of rate does one unit of work in a nanosecond."""

MAX_FLOW_BYTES = 920 * 10**9
MAX_RATE_UNITS = 1 << 50
"""Work left, in units, and one more nanosecond at the highest rate, fit in 64 bits:
920e9 * 1e7 + 2**50 < 2**63. A unit of rate is 100 bytes/s, so that is 1e17 bytes/s."""

Int = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGraph:
    """Arrays of n tasks; ragged columns are in compressed rows (`x[x_start[i]:x_start[i+1]]`).

    `rate_cap` and `capacity` are in units of RATE_UNIT_BYTES_PER_S. `kind`, `name` and
    `cost_source` describe tasks to people only. `memory` of task i changes its stream's device
    by `alloc_bytes[i]` at its start and by `-free_bytes[i]` at its end.
    """

    streams: tuple[str, ...]
    ranks: tuple[int, ...]
    links: tuple[str, ...]
    stream: Int
    delay_ns: Int
    work_bytes: Int
    rate_cap: Int
    link_start: Int
    link: Int
    need_start: Int
    need: Int
    capacity: Int
    alloc_bytes: Int
    free_bytes: Int
    kind: tuple[str, ...]
    name: tuple[str, ...]
    cost_source: tuple[str, ...]

    def __post_init__(self) -> None:
        tasks = len(self.stream)
        for column in ("delay_ns", "work_bytes", "rate_cap", "alloc_bytes", "free_bytes"):
            _check_length(column, getattr(self, column), tasks)
        for column in ("kind", "name", "cost_source"):
            _check_length(column, getattr(self, column), tasks)
        _check_length("ranks", self.ranks, len(self.streams))
        _check_length("capacity", self.capacity, len(self.links))
        _check_rows("link", self.link_start, self.link, tasks)
        _check_rows("need", self.need_start, self.need, tasks)
        _check_range("stream", self.stream, 0, len(self.streams) - 1)
        _check_range("link", self.link, 0, len(self.links) - 1)
        _check_range("need", self.need, 0, tasks - 1)
        _check_range("delay_ns", self.delay_ns, 0)
        _check_range("work_bytes", self.work_bytes, 0, MAX_FLOW_BYTES)
        _check_range("capacity", self.capacity, 1, MAX_RATE_UNITS)
        flows = np.flatnonzero(self.work_bytes)
        _check_range("rate_cap", self.rate_cap[flows], 1, MAX_RATE_UNITS)
        if not np.diff(self.link_start)[flows].all():
            raise SimulationError("a task with work_bytes has a link to go over, but one has none")

    def __len__(self) -> int:
        return len(self.stream)


class TaskGraphBuilder:
    """Collects tasks; `add` answers with the task's id, to be used in later `needs`.

    Numbers are kept as 64-bit integers in one array: a step may have some 100,000 tasks.
    """

    def __init__(self) -> None:
        self._streams: list[str] = []
        self._ranks: list[int] = []
        self._links: list[str] = []
        self._capacity: list[int] = []
        self._numbers = array("q")  # of each task in turn, as `build` takes them apart
        self._labels: list[str] = []  # likewise: kind, name, cost source
        self._task_links, self._task_needs = array("q"), array("q")
        self._tasks = 0

    def stream(self, name: str, rank: int) -> int:
        """Adds a stream of the device `rank` (the stage a folded class stands for)."""
        self._streams.append(name)
        self._ranks.append(rank)
        return len(self._streams) - 1

    def link(self, name: str, bytes_per_s: float) -> int:
        """Adds a link of a capacity above zero."""
        if not bytes_per_s > 0:
            raise ValueError(f"a link has a capacity, but {name!r} got {bytes_per_s=}")
        self._links.append(name)
        self._capacity.append(rate_units(bytes_per_s))
        return len(self._links) - 1

    def add(
        self,
        stream: int,
        delay_ns: int,
        needs: Sequence[int] = (),
        *,
        kind: str,
        name: str,
        cost_source: str = "",
        work_bytes: int = 0,
        rate_cap_bytes_per_s: float = 0.0,
        links: Sequence[int] = (),
        alloc_bytes: int = 0,
        free_bytes: int = 0,
    ) -> int:
        """Adds a task; without `work_bytes` it is a pure delay. Needs must name earlier tasks."""
        task = self._tasks
        if delay_ns < 0 or work_bytes < 0:
            raise ValueError(
                f"{name}: times and bytes are not negative: {delay_ns=} {work_bytes=}"
            )
        cap = 0
        if work_bytes:
            if not links:
                raise ValueError(f"{name}: {work_bytes=} need a link to go over")
            if not rate_cap_bytes_per_s > 0:
                raise ValueError(f"{name}: a flow has a rate cap, but got {rate_cap_bytes_per_s=}")
            cap = rate_units(rate_cap_bytes_per_s)
            self._task_links.extend(links)
        for need in needs:
            if not 0 <= need < task:
                raise ValueError(f"{name}: task {task} needs earlier tasks only, but got {needs=}")
        self._task_needs.extend(needs)
        ends = len(self._task_links), len(self._task_needs)
        self._numbers.extend((stream, delay_ns, work_bytes, cap, alloc_bytes, free_bytes, *ends))
        self._labels += (kind, name, cost_source)
        self._tasks += 1
        return task

    def build(self) -> TaskGraph:
        """The finished graph."""
        columns = np.array(self._numbers, dtype=np.int64).reshape(-1, 8).T.copy()
        stream, delay_ns, work_bytes, rate_cap, alloc_bytes, free_bytes, links, needs = columns
        return TaskGraph(
            streams=tuple(self._streams),
            ranks=tuple(self._ranks),
            links=tuple(self._links),
            stream=stream,
            delay_ns=delay_ns,
            work_bytes=work_bytes,
            rate_cap=rate_cap,
            link_start=np.concatenate(([0], links)),
            link=np.array(self._task_links, dtype=np.int64),
            need_start=np.concatenate(([0], needs)),
            need=np.array(self._task_needs, dtype=np.int64),
            capacity=np.array(self._capacity, dtype=np.int64),
            alloc_bytes=alloc_bytes,
            free_bytes=free_bytes,
            kind=tuple(self._labels[0::3]),
            name=tuple(self._labels[1::3]),
            cost_source=tuple(self._labels[2::3]),
        )


def rate_units(bytes_per_s: float) -> int:
    """A rate in whole units, at least one."""
    return max(1, int(bytes_per_s // RATE_UNIT_BYTES_PER_S))


def _check_length(column: str, values: Sized, expected: int) -> None:
    if len(values) != expected:
        raise SimulationError(f"{column} has {len(values)} entries, but there are {expected}")


def _check_rows(column: str, start: Int, flat: Int, tasks: int) -> None:
    _check_length(f"{column}_start", start, tasks + 1)
    if start[0] or start[-1] != len(flat) or (np.diff(start) < 0).any():
        raise SimulationError(f"{column}_start does not cut {column} into {tasks} rows")


def _check_range(column: str, values: Int, low: int, high: int | None = None) -> None:
    if not len(values):
        return
    least, most = int(values.min()), int(values.max())
    if least < low or (high is not None and most > high):
        bad = least if least < low else most
        limit = f"{low} to {high}" if high is not None else f"at least {low}"
        raise SimulationError(f"{column} is {limit}, but one task or link has {bad}")


def deadlock(graph: TaskGraph, finish_ns: Int) -> Deadlock:
    """The error for a graph that stopped, where `finish_ns` is negative for what did not run."""
    left = np.flatnonzero(finish_ns < 0)
    streams, first = np.unique(graph.stream[left], return_index=True)
    stuck = []
    for stream, task in zip(streams, left[first], strict=True):
        needs = graph.need[graph.need_start[task] : graph.need_start[task + 1]]
        waits = ", ".join(repr(graph.name[need]) for need in needs if finish_ns[need] < 0)
        where = f"rank {graph.ranks[stream]} {graph.streams[stream]}"
        stuck.append(f"{where}: {graph.name[task]!r} waits for {waits or 'its turn'}")
    return Deadlock(f"tasks wait for each other; {'; '.join(stuck)}")
