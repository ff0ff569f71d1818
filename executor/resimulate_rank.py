"""One rank's step as tasks: stretches of computation, pauses of the host, and collectives.

Computation is cut where a collective begins, which waits for all before. Between stretches of
computation lies a pause. Where it ends with a collective, and the rank goes on at once, it was a
wait for it and becomes a need; all other pauses are the host's and become tasks of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from claw_plan.executor.replay_collectives import Matched
from claw_plan.executor.replay_parts import computing
from claw_plan.executor.trace_readers.rank_trace import KINDS, PHASES, Collective, RankTrace, Step

COMPUTE = "compute"
HOST = "host"
"""The name of a pause's task."""
RESUMES_NS = 300_000
"""A rank that goes on so soon after a collective's end has waited for it: launching a kernel
takes some microseconds, but a CPU's thread is woken only with its next time slice."""

RESUMES_SHARE = 0.05
"""Of the collective's duration, likewise: on slow links times scatter more."""

END, START = 0, 1
"""At one instant what ends comes before what begins."""


@dataclass(kw_only=True)
class RankTask:
    """A task of one rank. `collective` is the index of a matched one, None for the rank's own.

    A collective comes after the rank's task `after_task`; `after` are collectives that the task
    needs; `mix` is the time by class of computation.
    """

    stream: str
    kind: str
    name: str
    duration_ns: int
    collective: int | None = None
    after_task: int | None = None
    after: tuple[int, ...] = ()
    mix: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_host(self) -> bool:
        """Whether it is a pause."""
        return self.collective is None and not self.mix


def rank_tasks(
    trace: RankTrace, matched: Sequence[Matched], step: Step, begin_ns: int
) -> list[RankTask]:
    """The rank's tasks in order of time, from `begin_ns`, when the first rank began the step."""
    assert trace.rank is not None
    own = {
        index: m.by_rank[trace.rank]
        for index, m in enumerate(matched)
        if trace.rank in m.by_rank and trace.has_timing
    }
    own = {index: one for index, one in own.items() if _within(one, step)}
    writer = _Writer(trace, own)
    events = sorted(
        event
        for index, one in own.items()
        for event in ((one.start_ns, START, index), (one.end_ns, END, index))
    )
    busy = computing(trace.activities, step.start_ns, step.end_ns)
    stretches = [*zip(busy.start.tolist(), busy.end.tolist(), strict=True)]
    time, at = begin_ns, 0
    for start, end in [*stretches, (step.end_ns, step.end_ns)]:
        until = at
        while until < len(events) and events[until][0] <= start:
            until += 1
        writer.pause(time, start, events[at:until])
        at = until
        while until < len(events) and events[until][0] < end:
            until += 1
        writer.stretch(start, end, events[at:until])
        time, at = end, until
    writer.pause(time, time, [event for event in events[at:] if event[1] == START])
    return writer.tasks


def _within(one: Collective, step: Step) -> bool:
    return step.start_ns <= one.start_ns < step.end_ns


class _Writer:
    """The tasks so far. `_waits` are collectives that the rank's next task needs."""

    def __init__(self, trace: RankTrace, own: Mapping[int, Collective]) -> None:
        self.tasks: list[RankTask] = []
        self._work = trace.activities
        self._duration = self._work.end_ns - self._work.start_ns
        self._own = own
        self._last: int | None = None
        self._waits: list[int] = []
        self._ended: list[int] = []
        first = np.flatnonzero(self._work.phase == PHASES.index("optimizer"))
        self._optimizer_ns = int(self._work.start_ns[first[0]]) if len(first) else None

    def pause(self, low: int, high: int, events: Sequence[tuple[int, int, int]]) -> None:
        """No computation from `low` to `high`; collectives begin and end meanwhile."""
        time = low
        for place, (when, what, index) in enumerate(events):
            following = next((t for t, kind, _ in events[place + 1 :] if kind == START), high)
            if what == START:
                self._host(time, when)
                self._collective(index)
                time = max(time, when)
            else:
                self._ended.append(index)
                if when > low and following - when <= self._resumes_ns(index):
                    self._waits.append(index)
                    time = max(time, when)
        self._host(time, high)

    def _resumes_ns(self, index: int) -> float:
        return max(RESUMES_NS, RESUMES_SHARE * self._own[index].duration_ns)

    def stretch(self, low: int, high: int, events: Sequence[tuple[int, int, int]]) -> None:
        """Computation from `low` to `high`."""
        time = low
        for when, what, index in events:
            if what == START:
                self._compute(time, when)
                self._collective(index)
                time = when
            else:
                self._ended.append(index)
        self._compute(time, high)

    def _compute(self, low: int, high: int) -> None:
        if high <= low:
            return
        if self._optimizer_ns is not None and low <= self._optimizer_ns < high:
            self._run(low, self._optimizer_ns)
            self._waits += self._ended
            low = self._optimizer_ns
        self._run(low, high)

    def _run(self, low: int, high: int) -> None:
        if high <= low:
            return
        first = int(np.searchsorted(self._work.start_ns, low))
        last = int(np.searchsorted(self._work.start_ns, high))
        if first == last:  # within a kernel that began before
            first = max(0, last - 1)
        weights = self._duration[first:last]
        by_kind = np.bincount(self._work.kind[first:last], weights, minlength=len(KINDS))
        by_phase = np.bincount(self._work.phase[first:last], weights, minlength=len(PHASES))
        mix = {kind: int(ns) for kind, ns in zip(KINDS, by_kind, strict=True) if ns}
        phase = PHASES[int(np.argmax(by_phase))]
        self._own_task(phase, phase, high - low, mix or {"host": high - low})

    def _host(self, low: int, high: int) -> None:
        if high > low:
            self._own_task("other", HOST, high - low, {})

    def _own_task(self, kind: str, name: str, duration_ns: int, mix: Mapping[str, int]) -> None:
        task = RankTask(
            stream=COMPUTE,
            kind=kind,
            name=name,
            duration_ns=duration_ns,
            after=tuple(self._waits),
            mix=mix,
        )
        self._waits = []
        self._last = len(self.tasks)
        self.tasks.append(task)

    def _collective(self, index: int) -> None:
        one = self._own[index]
        size = "" if one.bytes is None else f" {one.bytes} B"
        self.tasks.append(
            RankTask(
                stream=f"communication {one.stream}",
                kind="pp_comm" if one.op in ("send", "recv") else "dp_comm",
                name=one.op + size,
                duration_ns=one.duration_ns,
                collective=index,
                after_task=self._last,
                after=tuple(self._waits),
            )
        )
