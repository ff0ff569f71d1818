"""Recordings of the ranks of one run become an analysis: where the time went, and why.

`replay` brings the ranks onto one clock, matches their collectives, and reports the typical step:
the one of median length among those recorded. Its parts, averaged over the ranks, add up to the
step time.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from claw_plan.executor.replay_collectives import Matched, align, match
from claw_plan.executor.replay_parts import IDLE, computing, parts_ns
from claw_plan.executor.replay_stragglers import Straggler, stragglers
from claw_plan.executor.trace_readers.rank_trace import RankTrace, Step
from claw_plan.profiles.errors import InputError

PARTIAL = 0.1
"""Steps shorter than this share of the longest are pieces: the recording ended within them."""

NAMED_RANKS = 8
"""Ranks that a sentence lists before it says how many more there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One step: from its first start to `time_ns` later; the slowest rank's time."""

    number: int
    start_ns: int
    time_ns: int
    by_rank_ns: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """Equal collectives of a step. `count` is that of one rank; times are of one call.

    `waiting_ns` is the mean over ranks; `transfer_ns` None where it cannot be told from waiting.
    `duration_ns` is the mean of what ranks saw, None where no times are recorded.
    """

    step: int | None
    op: str
    bytes: int | None
    count: int
    group_size: int | None
    duration_ns: int | None
    transfer_ns: int | None
    waiting_ns: int | None


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The analysis. `typical` is the number of the step that `parts_ns` describe; `range_ns` the
    shortest and the longest of those recorded in full.
    """

    traces: tuple[RankTrace, ...]
    matched: tuple[Matched, ...]
    world_size: int | None
    steps: tuple[StepTime, ...]
    typical: int
    step_time_ns: int
    range_ns: tuple[int, int]
    parts_ns: dict[str, int]
    utilisation: dict[int, float]
    collectives: tuple[CollectiveRow, ...]
    stragglers: tuple[Straggler, ...]
    warnings: tuple[str, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that are recorded."""
        return tuple(trace.rank for trace in self.traces if trace.rank is not None)

    def typical_step(self, trace: RankTrace) -> Step | None:
        """The rank's own window of the typical step."""
        return next((step for step in trace.steps if step.number == self.typical), None)


def replay(traces: Sequence[RankTrace]) -> Replay:
    """Analyses the recordings of one run. Raises InputError when they share no step."""
    aligned, said = align(traces, match(traces))
    matched = tuple(match(aligned))
    steps = _steps(aligned)
    whole = [step for step in steps if step.time_ns >= PARTIAL * max(s.time_ns for s in steps)]
    step_time = statistics.median_low(step.time_ns for step in whole)
    typical = next(step for step in whole if step.time_ns == step_time)
    warnings = [said] if said else []
    if len(whole) < len(steps):
        left = ", ".join(str(step.number) for step in steps if step not in whole)
        warnings.append(f"steps {left} are recorded in part only and do not count for step times")
    world = max((trace.world_size or 0 for trace in aligned), default=0) or None
    found = Replay(
        traces=aligned,
        matched=matched,
        world_size=world,
        steps=steps,
        typical=typical.number,
        step_time_ns=step_time,
        range_ns=(min(s.time_ns for s in whole), max(s.time_ns for s in whole)),
        parts_ns=_parts(aligned, matched, typical),
        utilisation=_utilisation(aligned, typical),
        collectives=_rows(aligned, matched),
        stragglers=stragglers(aligned, matched, step_time, len(steps)),
        warnings=(*_of_traces(aligned), *warnings, *_missing(aligned, matched, world)),
    )
    return found


def _steps(traces: Sequence[RankTrace]) -> tuple[StepTime, ...]:
    """The steps that all ranks recorded."""
    own = [{step.number: step for step in trace.steps} for trace in traces]
    shared = set(own[0]).intersection(*own[1:])
    if not shared:
        first, other = traces[0], next(t for t, s in zip(traces, own, strict=True) if s != own[0])
        raise InputError(
            f"{first.source} and {other.source} share no step: record the same steps on all ranks"
        )
    return tuple(
        StepTime(
            number=number,
            start_ns=min(steps[number].start_ns for steps in own),
            time_ns=max(steps[number].duration_ns for steps in own),
            by_rank_ns={
                trace.rank: steps[number].duration_ns
                for trace, steps in zip(traces, own, strict=True)
                if trace.rank is not None
            },
        )
        for number in sorted(shared, key=lambda number: own[0][number].start_ns)
    )


def _window(trace: RankTrace, number: int) -> Step:
    return next(step for step in trace.steps if step.number == number)


def _parts(
    traces: Sequence[RankTrace], matched: Sequence[Matched], typical: StepTime
) -> dict[str, int]:
    """The mean over the ranks; a rank that took less than the slowest was idle the rest."""
    if not any(trace.has_timing or len(trace.activities) for trace in traces):
        return {}
    total: dict[str, int] = defaultdict(int)
    for trace in traces:
        step = _window(trace, typical.number)
        parts = parts_ns(trace, matched, step.start_ns, step.end_ns)
        parts[IDLE] += typical.time_ns - step.duration_ns
        for name, ns in parts.items():
            total[name] += ns
    mean = {name: ns // len(traces) for name, ns in total.items()}
    mean[IDLE] += typical.time_ns - sum(mean.values())
    return mean


def _utilisation(traces: Sequence[RankTrace], typical: StepTime) -> dict[int, float]:
    busy = {}
    for trace in traces:
        step = _window(trace, typical.number)
        length = computing(trace.activities, step.start_ns, step.end_ns).length
        busy[trace.rank or 0] = length / max(1, step.duration_ns)
    return busy


def _rows(traces: Sequence[RankTrace], matched: Sequence[Matched]) -> tuple[CollectiveRow, ...]:
    """Collectives by step, operation, size and group, in the order of their first arrival."""
    timed = {trace.rank for trace in traces if trace.has_timing}
    groups: dict[tuple[object, ...], list[Matched]] = defaultdict(list)
    for m in matched:
        groups[m.step, m.op, m.bytes, m.group_size].append(m)
    rows = []
    for some in groups.values():
        calls = Counter(rank for m in some for rank in m.by_rank)
        seen = [one for m in some for rank, one in m.by_rank.items() if rank in timed]
        told = [m for m in some if m.can_tell and timed.issuperset(m.by_rank)]
        waits = [m.waiting_ns(rank) for m in told for rank in m.by_rank]
        rows.append(
            CollectiveRow(
                step=some[0].step,
                op=some[0].op,
                bytes=some[0].bytes,
                count=max(calls.values()),
                group_size=some[0].group_size,
                duration_ns=_mean(one.duration_ns for one in seen),
                transfer_ns=_mean(m.transfer_ns for m in told),
                waiting_ns=_mean(waits),
            )
        )
    return tuple(rows)


def _mean(values: Iterable[int]) -> int | None:
    values = list(values)
    return round(sum(values) / len(values)) if values else None


def _of_traces(traces: Sequence[RankTrace]) -> list[str]:
    """Each sentence once, with the ranks it is about unless they are all."""
    about: dict[str, list[int]] = defaultdict(list)
    for trace in traces:
        for sentence in trace.warnings:
            about[sentence].append(trace.rank or 0)
    said = []
    for sentence, ranks in about.items():
        of_all = len(ranks) == len(traces)
        said.append(sentence if of_all else f"rank {_listed(ranks)}: {sentence}")
    return said


def _listed(ranks: Sequence[int]) -> str:
    text = ", ".join(map(str, ranks[:NAMED_RANKS]))
    return text if len(ranks) <= NAMED_RANKS else f"{text} and {len(ranks) - NAMED_RANKS} more"


def _missing(
    traces: Sequence[RankTrace], matched: Sequence[Matched], world: int | None
) -> list[str]:
    """What the recordings do not hold, and what therefore cannot be told."""
    said = []
    if world is not None and len(traces) < world:
        said.append(
            f"{len(traces)} of {world} ranks are recorded: nothing is known of the others"
            + ("" if len(traces) > 1 else ", and waiting cannot be told from transfer")
        )
    if any(not trace.has_timing for trace in traces) and matched:
        said.append(
            "collectives have no times in it, only when the host asked for them: record GPU "
            "activities too"
        )
    apart = sum(m.step is None for m in matched)
    if apart:
        said.append(f"{apart} collectives lie outside of the recorded steps")
    return said
