"""A `Timeline` becomes a Chrome trace that ui.perfetto.dev and chrome://tracing open.

A rank is a process, a stream a thread, a span a complete event, and memory a counter. Only here
are times in microseconds, with the nanoseconds as decimals, because the format has them so.

Source: "Trace Event Format" (Google, 2016), phases X, C and M.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from claw_plan.profiles.files import write_atomic
from claw_plan.profiles.units import NS_PER_US
from claw_plan.simulator.timeline import Span, Timeline

Event = dict[str, Any]


def write_trace(timeline: Timeline, path: Path, title: str) -> None:
    """Writes the trace atomically. Raises InputError when the folder cannot be written to."""
    trace = {
        "traceEvents": list(_events(timeline)),
        "displayTimeUnit": "ns",
        "otherData": {"title": title, "origin": timeline.origin},
    }
    text = json.dumps(trace, allow_nan=False, separators=(",", ":"))
    write_atomic(path, text + "\n")


def _events(timeline: Timeline) -> Iterator[Event]:
    thread_of = _threads(timeline)
    for rank in sorted({rank for rank, _ in thread_of} | {s.rank for s in timeline.memory}):
        yield _metadata("process_name", rank, 0, name=f"rank {rank}")
        yield _metadata("process_sort_index", rank, 0, sort_index=rank)
    for (rank, stream), thread in thread_of.items():
        yield _metadata("thread_name", rank, thread, name=stream)
        yield _metadata("thread_sort_index", rank, thread, sort_index=thread)
    for span in timeline.spans:
        yield _complete(span, thread_of[span.rank, span.stream])
    for sample in timeline.memory:
        yield {
            "ph": "C",
            "name": "memory",
            "pid": sample.rank,
            "tid": 0,
            "ts": _microseconds(sample.time_ns),
            "args": {"bytes": sample.bytes},
        }


def _threads(timeline: Timeline) -> dict[tuple[int, str], int]:
    """A number from 0 for each stream of a rank, in the order of their first spans."""
    threads: dict[tuple[int, str], int] = {}
    streams_of: dict[int, int] = {}
    for span in timeline.spans:
        if (span.rank, span.stream) not in threads:
            threads[span.rank, span.stream] = streams_of.get(span.rank, 0)
            streams_of[span.rank] = streams_of.get(span.rank, 0) + 1
    return threads


def _complete(span: Span, thread: int) -> Event:
    event: Event = {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": span.rank,
        "tid": thread,
        "ts": _microseconds(span.start_ns),
        "dur": _microseconds(span.duration_ns),
    }
    if span.cost_source:
        event["args"] = {"cost_source": span.cost_source}
    return event


def _metadata(what: str, rank: int, thread: int, /, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": args}


def _microseconds(time_ns: int) -> float:
    """Exact to the nanosecond below 2**43 us (101 days): doubles lie closer than 0.001 there."""
    return time_ns / NS_PER_US
