"""The same collective as several ranks saw it: who waited for whom, and what the transfer took.

A rank's own duration of a collective is mostly waiting for the others. Put side by side, the
ranks tell them apart: the transfer begins when the last rank arrives. Ranks of different hosts
have different clocks; where their times contradict each other, the clocks are aligned by the ends
of collectives, which all ranks see within microseconds.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from claw_plan.executor.trace_readers.rank_trace import Collective, RankTrace, Step

MESSAGE = "send"
MEETING_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Operations that no rank can leave before all have come."""

CONTRADICTIONS = 0.05
"""Share of collectives that a rank leaves before another arrives, from which clocks are taken to
differ: single ones come from matching a collective with the wrong one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """One collective and the ranks that recorded it. `step` is None outside of steps.

    A message between two ranks is one 'send'. `is_whole` tells whether all ranks of the group are
    there.
    """

    op: str
    bytes: int | None
    group_size: int | None
    step: int | None
    by_rank: Mapping[int, Collective]
    is_whole: bool

    @property
    def can_tell(self) -> bool:
        """Whether waiting and transfer can be told apart."""
        return len(self.by_rank) > 1 and self.op in (*MEETING_OPS, MESSAGE)

    def sources(self, rank: int) -> tuple[int, ...]:
        """The recorded ranks that must have come before the rank's own part can begin."""
        if self.op == MESSAGE and self.by_rank[rank].op == "send":
            return (rank,)
        return tuple(self.by_rank) if self.can_tell else (rank,)

    def met_ns(self, rank: int) -> int:
        """When they all had come."""
        return max(self.by_rank[source].start_ns for source in self.sources(rank))

    def waiting_ns(self, rank: int) -> int:
        """How long the rank waited for others; 0 where that cannot be told."""
        own = self.by_rank[rank]
        return max(0, min(own.duration_ns, self.met_ns(rank) - own.start_ns))

    @property
    def transfer_ns(self) -> int:
        """The time of the rank that waited least: an upper bound while ranks are missing."""
        if self.op == MESSAGE and self.can_tell:
            ends = {one.op: one.end_ns for one in self.by_rank.values()}
            met = max(one.start_ns for one in self.by_rank.values())
            return max(0, ends.get("recv", met) - met)
        return min(one.duration_ns for one in self.by_rank.values())


def step_of(trace: RankTrace, one: Collective) -> int | None:
    """The step in which the host asked for the collective."""
    for step in trace.steps:
        if step.start_ns <= one.issue_ns < step.end_ns:
            return step.number
    return None


def match(traces: Sequence[RankTrace]) -> list[Matched]:
    """All collectives, each with the ranks that saw it, in order of the first arrival.

    The n-th of an operation, size and group in a step is the same one on every rank.
    """
    found: dict[tuple[object, ...], dict[int, Collective]] = defaultdict(dict)
    for trace in traces:
        assert trace.rank is not None
        counts: Counter[tuple[object, ...]] = Counter()
        other = _only_other(traces, trace.rank)
        for one in trace.collectives:
            key = (step_of(trace, one), *_identity(one, trace.rank, other))
            found[*key, counts[key]][trace.rank] = one
            counts[key] += 1
    matched = [_matched(key[0], by_rank) for key, by_rank in found.items()]
    return sorted(matched, key=lambda m: min(one.start_ns for one in m.by_rank.values()))


def _only_other(traces: Sequence[RankTrace], rank: int) -> int | None:
    """The peer of every message in a run of two ranks."""
    both = len(traces) == 2 and all(trace.world_size == 2 for trace in traces)
    return next(trace.rank for trace in traces if trace.rank != rank) if both else None


def _identity(one: Collective, rank: int, only_other: int | None) -> tuple[object, ...]:
    """What is equal on all ranks of a collective; of a message sender, receiver and its name."""
    if one.op not in ("send", "recv"):
        return one.op, one.bytes, one.ranks or one.group
    peer = one.peer if one.peer is not None else only_other
    if peer is None:  # then it stays this rank's own
        return MESSAGE, one.bytes, one.group, one.op, rank
    return MESSAGE, one.group, (rank, peer) if one.op == "send" else (peer, rank)


def _matched(step: object, by_rank: Mapping[int, Collective]) -> Matched:
    first = next(iter(by_rank.values()))
    is_message = first.op in ("send", "recv")
    size = 2 if is_message else first.group_size
    assert step is None or isinstance(step, int)
    return Matched(
        op=MESSAGE if is_message else first.op,
        bytes=first.bytes,
        group_size=size,
        step=step,
        by_rank=by_rank,
        is_whole=size is not None and len(by_rank) >= size,
    )


def align(
    traces: Sequence[RankTrace], matched: Sequence[Matched]
) -> tuple[tuple[RankTrace, ...], str]:
    """The traces on one clock, and a sentence if that took more than believing them."""
    meetings = [m for m in matched if m.can_tell and m.op in MEETING_OPS]
    against = sum(
        max(one.start_ns for one in m.by_rank.values())
        > min(one.end_ns for one in m.by_rank.values())
        for m in meetings
    )
    if against <= CONTRADICTIONS * len(meetings):
        return tuple(traces), ""
    offsets: dict[int, list[int]] = defaultdict(list)
    for m in meetings:
        middle = statistics.median_low(one.end_ns for one in m.by_rank.values())
        for rank, one in m.by_rank.items():
            offsets[rank].append(one.end_ns - middle)
    shifts = {rank: -statistics.median_low(some) for rank, some in offsets.items()}
    largest = max(abs(shift) for shift in shifts.values())
    moved = tuple(shifted(trace, shifts.get(_rank(trace), 0)) for trace in traces)
    return moved, (
        f"the ranks' clocks differ by up to {largest / 1e6:.3g} ms: they were aligned by the ends "
        "of collectives"
    )


def _rank(trace: RankTrace) -> int:
    assert trace.rank is not None
    return trace.rank


def shifted(trace: RankTrace, by_ns: int) -> RankTrace:
    """The trace with all its times moved."""
    if not by_ns:
        return trace
    work = trace.activities
    return replace(
        trace,
        activities=replace(work, start_ns=work.start_ns + by_ns, end_ns=work.end_ns + by_ns),
        collectives=tuple(
            replace(
                one,
                start_ns=one.start_ns + by_ns,
                end_ns=one.end_ns + by_ns,
                issue_ns=one.issue_ns + by_ns,
            )
            for one in trace.collectives
        ),
        steps=tuple(
            Step(number=s.number, start_ns=s.start_ns + by_ns, end_ns=s.end_ns + by_ns)
            for s in trace.steps
        ),
    )
