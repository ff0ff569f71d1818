"""Which ranks the others wait for, and what these ranks did meanwhile.

A rank is late at a collective when it arrives after the mean of the others. What it did since the
collective before, beside what the others did in theirs, is the cause: computing longer, loading
data, communicating in another group, or nothing that was recorded (the host).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from claw_plan.executor.replay_collectives import MEETING_OPS, Matched
from claw_plan.executor.replay_parts import communicating, computing, loading
from claw_plan.executor.trace_readers.intervals import Intervals, clip, subtract
from claw_plan.executor.trace_readers.rank_trace import RankTrace

LATE_SHARE = 0.05
"""Of the step, from which a rank is a straggler: below lies the jitter of equal ranks (the spread
of published clusters' steps is 2 to 6.5 %)."""

COMPUTE, INPUT, COMMUNICATION, HOST, START = (
    "compute", "input", "communication", "host", "late start",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that others wait for: how long in a step, as a share of it, and why.

    `late_ns` is what it is late beyond the others, who take turns at being last too.
    """

    rank: int
    late_ns: int
    share: float
    cause: str


def stragglers(
    traces: Sequence[RankTrace], matched: Sequence[Matched], step_time_ns: int, num_steps: int
) -> tuple[Straggler, ...]:
    """The latest first. Empty with fewer than two ranks."""
    by_rank = {_rank(trace): _Busy(trace) for trace in traces}
    late: dict[int, int] = defaultdict(int)
    causes: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    since: dict[int, int] = {}
    for m in matched:
        if not m.can_tell or m.step is None or m.op not in MEETING_OPS:
            continue
        begins = {rank: _since(by_rank[rank], since, m, rank) for rank in m.by_rank}
        arrivals = {rank: one.start_ns for rank, one in m.by_rank.items()}
        last = max(arrivals, key=lambda rank: (arrivals[rank], -rank))
        others = [rank for rank in arrivals if rank != last]
        by = arrivals[last] - sum(arrivals[rank] for rank in others) / len(others)
        late[last] += round(by)
        for cause, ns in _excess(by_rank, begins, arrivals, last, others).items():
            causes[last][cause] += min(ns, by)
        for rank, one in m.by_rank.items():
            since[rank] = max(since.get(rank, 0), one.end_ns)
    found = []
    for rank in late:
        others_ns = sum(late[other] for other in late if other != rank) / max(1, len(traces) - 1)
        ns = (late[rank] - others_ns) / num_steps
        if step_time_ns and ns / step_time_ns >= LATE_SHARE:
            cause = max(causes[rank], key=lambda name: causes[rank][name], default=HOST)
            share = ns / step_time_ns
            found.append(Straggler(rank=rank, late_ns=round(ns), share=share, cause=cause))
    return tuple(sorted(found, key=lambda one: -one.late_ns))


def _rank(trace: RankTrace) -> int:
    assert trace.rank is not None
    return trace.rank


class _Busy:
    """When a rank does what, over its whole recording."""

    def __init__(self, trace: RankTrace) -> None:
        low = min(step.start_ns for step in trace.steps)
        high = max(step.end_ns for step in trace.steps)
        self.steps = {step.number: step for step in trace.steps}
        compute = computing(trace.activities, low, high)
        comm = subtract(communicating(trace, low, high), compute)
        loader = subtract(subtract(loading(trace.activities, low, high), compute), comm)
        self.what = {COMPUTE: compute, INPUT: loader, COMMUNICATION: comm}

    def spent(self, low: int, high: int) -> Mapping[str, int]:
        """Time by cause between two times; the host has what is left."""
        spent = {cause: _length(some, low, high) for cause, some in self.what.items()}
        return spent | {HOST: max(0, high - low - sum(spent.values()))}


def _length(some: Intervals, low: int, high: int) -> int:
    return clip(some, low, high).length if high > low else 0


def _since(busy: _Busy, since: Mapping[int, int], m: Matched, rank: int) -> int:
    """When the rank left the collective before, in this step; else when the step began."""
    start = busy.steps[m.step].start_ns if m.step in busy.steps else m.by_rank[rank].start_ns
    return max(start, min(since.get(rank, start), m.by_rank[rank].start_ns))


def _excess(
    by_rank: Mapping[int, _Busy],
    begins: Mapping[int, int],
    arrivals: Mapping[int, int],
    last: int,
    others: Sequence[int],
) -> dict[str, float]:
    """What the last rank did longer than the mean of the others, and how much later it began."""
    own = by_rank[last].spent(begins[last], arrivals[last])
    mean = {
        cause: sum(by_rank[r].spent(begins[r], arrivals[r])[cause] for r in others) / len(others)
        for cause in own
    }
    excess = {cause: own[cause] - mean[cause] for cause in own}
    excess[START] = begins[last] - sum(begins[rank] for rank in others) / len(others)
    return {cause: ns for cause, ns in excess.items() if ns > 0}
