"""The typical step of a recording as a MEASURED `Timeline`, comparable with simulated ones."""

from __future__ import annotations

from collections.abc import Iterator

from claw_plan.executor.replay import Replay
from claw_plan.executor.trace_readers.rank_trace import KINDS, PHASES, Collective, RankTrace, Step
from claw_plan.simulator.timeline import MEASURED, Span, Timeline


def timeline_of(found: Replay) -> Timeline:
    """Spans of all recorded ranks; time 0 is when the first of them began the step."""
    windows = [(trace, found.typical_step(trace)) for trace in found.traces]
    steps = [(trace, step) for trace, step in windows if step is not None]
    begin_ns = min(step.start_ns for _, step in steps)
    spans = [span for trace, step in steps for span in _spans(trace, step, begin_ns)]
    spans.sort(key=lambda span: (span.start_ns, span.rank))
    return Timeline(origin=MEASURED, spans=tuple(spans))


def _spans(trace: RankTrace, step: Step, begin_ns: int) -> Iterator[Span]:
    rank, work = trace.rank or 0, trace.activities
    within = (work.end_ns > step.start_ns) & (work.start_ns < step.end_ns)
    for start, end, kind, phase, name in zip(
        work.start_ns[within].tolist(),
        work.end_ns[within].tolist(),
        work.kind[within].tolist(),
        work.phase[within].tolist(),
        work.name[within].tolist(),
        strict=True,
    ):
        yield Span(
            rank=rank,
            stream="input" if KINDS[kind] == "input" else "compute",
            kind=PHASES[phase],
            name=work.names[name],
            start_ns=max(start, step.start_ns) - begin_ns,
            end_ns=min(end, step.end_ns) - begin_ns,
        )
    if trace.has_timing:
        for one in trace.collectives:
            if one.end_ns > step.start_ns and one.start_ns < step.end_ns:
                yield _span(rank, one, step, begin_ns)


def _span(rank: int, one: Collective, step: Step, begin_ns: int) -> Span:
    return Span(
        rank=rank,
        stream=f"communication {one.stream}",
        kind="pp_comm" if one.op in ("send", "recv") else "dp_comm",
        name=one.op,
        start_ns=max(one.start_ns, step.start_ns) - begin_ns,
        end_ns=min(one.end_ns, step.end_ns) - begin_ns,
        bytes=one.bytes or 0,
        group=one.ranks,
    )
