"""What `kineto` keeps of a trace while it reads, and the `RankTrace` it makes of it at the end.

A kernel's phase is that of the call that launched it: backward where autograd's engine runs on
that thread, optimizer within `Optimizer.step`. A trace without kernels is of a CPU: then the
operators themselves are the computation, each instant counted for the innermost.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from claw_plan.executor.trace_readers.intervals import (
    NONE,
    Int,
    Intervals,
    flatten,
    inside,
    intervals,
    subtract,
    union,
)
from claw_plan.executor.trace_readers.kineto_collectives import collectives_of
from claw_plan.executor.trace_readers.rank_trace import (
    KINDS,
    PHASES,
    Activities,
    RankTrace,
    Step,
    TimedWork,
    activities,
    kind_of,
)
from claw_plan.executor.trace_readers.shaped_ops import Call, work_of
from claw_plan.profiles.errors import InputError

FORWARD, BACKWARD, OPTIMIZER, OTHER = (PHASES.index(phase) for phase in PHASES)
AUTOGRAD = "autograd::engine::evaluate_function"
MOST_SAMPLES = 64
"""Of one piece of work: a step runs some kernels hundreds of times."""


class CommOp(NamedTuple):
    """An operator or annotation on a CPU thread that asks for a collective."""

    name: str
    start_ns: int
    end_ns: int
    thread: int
    args: dict[str, Any]


@dataclass
class Facts:
    """What the trace says of itself, as it stands there."""

    distributed: dict[str, Any] = field(default_factory=dict)
    devices: list[dict[str, Any]] = field(default_factory=list)
    base_ns: int = 0
    host_name: str = ""

    def number(self, key: str) -> int | None:
        """A rank or a world size."""
        value = self.distributed.get(key)
        return value if type(value) is int and 0 <= value < 1 << 31 else None


class Columns:
    """Rows of numbers, flat: kernels and operators five a row, launches three."""

    def __init__(self, source: str, facts: Facts) -> None:
        self.source = source
        self.facts = facts
        self.kernels = array("q")
        self.operators = array("q")
        self.launches = array("q")
        self.comm_kernels: list[int] = []
        self.comm_kernel_args: list[dict[str, Any]] = []
        self.comm_ops: list[CommOp] = []
        self.steps: list[tuple[int, int, int]] = []
        self.optimizer_steps: list[tuple[int, int]] = []
        self.inputs: list[tuple[int, int]] = []
        self._names: dict[str, int] = {}
        self._lanes: dict[str, int] = {}
        self._threads: dict[str, int] = {}
        self._calls: dict[Call, int] = {}
        self._broken: Counter[str] = Counter()

    def broken(self, why: str) -> None:
        """Counts an event that is left out."""
        self._broken[why] += 1

    def thread(self, process: object, thread: object) -> int:
        """A number for a CPU thread."""
        return self._threads.setdefault(f"{process}/{thread}", len(self._threads))

    def call(self, call: Call) -> int:
        """A number for an operator with its shapes."""
        return self._calls.setdefault(call, len(self._calls))

    def kernel(self, start: int, end: int, name: str, lane: str, correlation: int) -> None:
        """A row of what ran on a device; `lane` is its stream."""
        what = self._names.setdefault(name, len(self._names))
        stream = self._lanes.setdefault(lane, len(self._lanes))
        self.kernels.extend((start, end, what, stream, correlation))

    def operator(self, start: int, end: int, name: str, thread: int, call: int) -> None:
        """A row of what ran on a CPU thread; `call` is -1 without known shapes."""
        what = self._names.setdefault(name, len(self._names))
        self.operators.extend((start, end, what, thread, call))

    def launch(self, correlation: int, start: int, thread: int) -> None:
        """A row of the host's calls that start kernels."""
        self.launches.extend((correlation, start, thread))

    def rank_trace(self) -> RankTrace:
        """Everything that was read."""
        if not (self.kernels or self.operators or self.comm_ops or self.steps):
            why = "; ".join(self._said()) or "its traceEvents hold nothing that lasts"
            raise InputError(
                f"{self.source}: no operator, kernel or step in it ({why}); is it a trace of "
                "torch.profiler?"
            )
        table = _Tables(self)
        steps, said = self._own_steps(table)
        found = collectives_of(self, table.launch_of_kernels, tuple(self._lanes))
        is_gpu = bool(self.kernels)
        if not is_gpu:
            said.append("no GPU events in it: computation is what its CPU operators took")
        used = max(1, len({lane.split(",")[0] for lane in self._lanes}))
        seen = len(self.facts.devices)
        if is_gpu and seen > used and self.facts.number("rank") is None:
            said.append(f"it sees {seen} devices and ran kernels on {used}")
        has_timing = is_gpu or not any(one.backend == "nccl" for one in found.collectives)
        base = self.facts.base_ns
        work = table.activities(tuple(self._names), base)
        return RankTrace(
            source=self.source,
            rank=self.facts.number("rank"),
            world_size=self.facts.number("world_size"),
            device=str(self.facts.devices[0].get("name", "")) if self.facts.devices else "",
            is_gpu=is_gpu,
            has_timing=has_timing,
            activities=work,
            collectives=found.collectives,
            steps=steps,
            works=table.works(tuple(self._names), tuple(self._calls)),
            host_name=self.facts.host_name,
            warnings=(*self._said(), *said, *found.warnings),
        )

    def _said(self) -> list[str]:
        return [f"{count} events {why}: left out" for why, count in self._broken.items()]

    def _own_steps(self, table: _Tables) -> tuple[tuple[Step, ...], list[str]]:
        base = self.facts.base_ns
        longest: dict[int, Step] = {}
        for number, start, end in self.steps:
            step = Step(number=number, start_ns=start + base, end_ns=end + base)
            known = longest.get(number)
            if step.duration_ns > (known.duration_ns if known else 0):
                longest[number] = step
        if longest:
            return tuple(sorted(longest.values(), key=lambda step: step.start_ns)), []
        low, high = table.window()
        whole = Step(number=0, start_ns=low + base, end_ns=max(high, low + 1) + base)
        return (whole,), ["no ProfilerStep marks in it: the whole recording counts as one step"]


class _Tables:
    """The columns as arrays, and what follows from them."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self.kernels = np.array(columns.kernels, dtype=np.int64).reshape(-1, 5)
        self.operators = np.array(columns.operators, dtype=np.int64).reshape(-1, 5)
        self.launch_of_kernels = self._launches()
        self._kinds = np.array([KINDS.index(kind_of(name)) for name in columns._names], np.int64)
        self._backward = self._backward_by_thread()
        self._optimizer = _union_of(columns.optimizer_steps)
        self._inputs = _union_of(columns.inputs)

    def window(self) -> tuple[int, int]:
        """First start and last end of all that was read."""
        comm = [(op.start_ns, op.end_ns) for op in self._columns.comm_ops]
        comm += [(start, end) for _, start, end in self._columns.steps]
        rows = [
            self.kernels[:, :2],
            self.operators[:, :2],
            np.array(comm, np.int64).reshape(-1, 2),
        ]
        times = np.concatenate(rows)
        return int(times[:, 0].min()), int(times[:, 1].max())

    def _launches(self) -> Int:
        """For each kernel when and on which thread it was launched, (-1, -1) if not known."""
        found = np.full((len(self.kernels), 2), -1, dtype=np.int64)
        launches = np.array(self._columns.launches, dtype=np.int64).reshape(-1, 3)
        if not len(launches) or not len(self.kernels):
            return found
        launches = launches[np.argsort(launches[:, 0], kind="stable")]
        wanted = self.kernels[:, 4]
        place = np.minimum(np.searchsorted(launches[:, 0], wanted), len(launches) - 1)
        hit = (launches[place, 0] == wanted) & (wanted >= 0)
        found[hit] = launches[place[hit], 1:]
        return found

    def _backward_by_thread(self) -> dict[int, Intervals]:
        names = self._columns._names
        engine = [index for name, index in names.items() if name.startswith(AUTOGRAD)]
        rows = self.operators[np.isin(self.operators[:, 2], engine)]
        return {
            int(thread): union(*rows[rows[:, 3] == thread][:, :2].T)
            for thread in np.unique(rows[:, 3])
        }

    def _phases(self, times: Int, threads: Int) -> Int:
        phases = np.where(threads < 0, OTHER, FORWARD)
        for thread, calls in self._backward.items():
            phases[(threads == thread) & inside(times, calls)] = BACKWARD
        phases[inside(times, self._optimizer)] = OPTIMIZER
        return phases

    def activities(self, names: tuple[str, ...], base_ns: int) -> Activities:
        """Computation: kernels and copies, or the operators of a CPU."""
        start, end, name, phase = self._kernel_rows() if len(self.kernels) else self._cpu_rows()
        kind = self._kinds[name] if len(name) else name
        kind = np.where(
            (phase == OPTIMIZER) & (kind == KINDS.index("memory")), KINDS.index("optimizer"), kind
        )
        if not len(self.kernels):
            kind = np.where(inside(start, self._inputs), KINDS.index("input"), kind)
        rows = np.stack([start + base_ns, end + base_ns, kind, phase, name], axis=1)
        waits = subtract(self._inputs, union(start, end)) if self._inputs else NONE
        extra = np.zeros((len(waits.start), 5), dtype=np.int64)
        extra[:, 0], extra[:, 1] = waits.start + base_ns, waits.end + base_ns
        extra[:, 2:] = KINDS.index("input"), OTHER, len(names)
        return activities(np.concatenate([rows, extra]), (*names, "data loader"))

    def _kernel_rows(self) -> tuple[Int, Int, Int, Int]:
        own = np.ones(len(self.kernels), dtype=bool)
        own[self._columns.comm_kernels] = False
        rows, launched = self.kernels[own], self.launch_of_kernels[own]
        return rows[:, 0], rows[:, 1], rows[:, 2], self._phases(launched[:, 0], launched[:, 1])

    def _cpu_rows(self) -> tuple[Int, Int, Int, Int]:
        parts = []
        for thread in np.unique(self.operators[:, 3]):
            rows = self.operators[self.operators[:, 3] == thread]
            start, end, name, _ = flatten(rows[:, 0], rows[:, 1], rows[:, 2])
            phase = self._phases(start, np.full(len(start), thread))
            parts.append(np.stack([start, end, name, phase], axis=1))
        flat = np.concatenate(parts) if parts else np.zeros((0, 4), dtype=np.int64)
        return flat[:, 0], flat[:, 1], flat[:, 2], flat[:, 3]

    def works(self, names: tuple[str, ...], calls: Sequence[Call]) -> tuple[TimedWork, ...]:
        """Operators with known shapes and how long they, or the kernels they launched, took."""
        rows = self.operators[self.operators[:, 4] >= 0]
        if not len(rows):
            return ()
        durations = self._device_time(rows) if len(self.kernels) else rows[:, 1] - rows[:, 0]
        phases = self._phases(rows[:, 0], rows[:, 3])
        samples: dict[tuple[int, int], list[int]] = {}
        for call, phase, ns in zip(
            rows[:, 4].tolist(), phases.tolist(), durations.tolist(), strict=True
        ):
            kept = samples.setdefault((call, phase), [])
            if ns > 0 and len(kept) < MOST_SAMPLES:
                kept.append(ns)
        found = []
        for (call, phase), times in samples.items():
            work = work_of(calls[call], PHASES[phase])
            if work is not None and times:
                found.append(TimedWork(work=work, samples_ns=tuple(times)))
        return tuple(found)

    def _device_time(self, rows: Int) -> Int:
        """Summed time of the kernels launched within each operator, on its thread."""
        total = np.zeros(len(rows), dtype=np.int64)
        time, thread = self.launch_of_kernels[:, 0], self.launch_of_kernels[:, 1]
        spent = self.kernels[:, 1] - self.kernels[:, 0]
        for one in np.unique(rows[:, 3]):
            mine = np.flatnonzero(thread == one)
            mine = mine[np.argsort(time[mine], kind="stable")]
            summed = np.concatenate([[0], np.cumsum(spent[mine])])
            own = np.flatnonzero(rows[:, 3] == one)
            first = np.searchsorted(time[mine], rows[own, 0])
            last = np.searchsorted(time[mine], rows[own, 1])
            total[own] = summed[np.maximum(last, first)] - summed[first]
        return total


def _union_of(pairs: list[tuple[int, int]]) -> Intervals:
    return union(*intervals(pairs))
