from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.cli.perfetto import write_trace
from claw_plan.profiles.errors import InputError
from claw_plan.simulator.timeline import MEASURED, SIMULATED, MemorySample, Span, Timeline


def span(rank: int, stream: str, name: str, start_ns: int, end_ns: int, source: str = "") -> Span:
    return Span(
        rank=rank,
        stream=stream,
        kind="forward",
        name=name,
        start_ns=start_ns,
        end_ns=end_ns,
        cost_source=source,
    )


def trace_of(timeline: Timeline, path: Path, title: str = "a plan") -> dict:
    write_trace(timeline, path, title)
    return json.loads(path.read_text(encoding="utf-8"), parse_float=Decimal)


def test_the_trace_of_two_ranks(tmp_path):
    timeline = Timeline(
        origin=SIMULATED,
        spans=(
            span(0, "compute", "0F0", 0, 1234567, "measured"),
            span(0, "tp", "all_gather", 5, 5),
            span(2, "compute", "1F0", 1_234_567, 2_000_000),
        ),
        memory=(MemorySample(rank=2, time_ns=1_234_567, bytes=1 << 40),),
    )
    trace = trace_of(timeline, tmp_path / "out.json", "gpt, tp=2 µ")
    assert trace["otherData"] == {"title": "gpt, tp=2 µ", "origin": "simulated"}
    assert trace["displayTimeUnit"] == "ns"

    def meta(what, pid, tid, **args):
        return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}

    assert trace["traceEvents"] == [
        meta("process_name", 0, 0, name="rank 0"),
        meta("process_sort_index", 0, 0, sort_index=0),
        meta("process_name", 2, 0, name="rank 2"),
        meta("process_sort_index", 2, 0, sort_index=2),
        meta("thread_name", 0, 0, name="compute"),
        meta("thread_sort_index", 0, 0, sort_index=0),
        meta("thread_name", 0, 1, name="tp"),
        meta("thread_sort_index", 0, 1, sort_index=1),
        meta("thread_name", 2, 0, name="compute"),
        meta("thread_sort_index", 2, 0, sort_index=0),
        {"ph": "X", "name": "0F0", "cat": "forward", "pid": 0, "tid": 0, "ts": Decimal("0.0"),
         "dur": Decimal("1234.567"), "args": {"cost_source": "measured"}},
        {"ph": "X", "name": "all_gather", "cat": "forward", "pid": 0, "tid": 1,
         "ts": Decimal("0.005"), "dur": Decimal("0.0")},
        {"ph": "X", "name": "1F0", "cat": "forward", "pid": 2, "tid": 0,
         "ts": Decimal("1234.567"), "dur": Decimal("765.433")},
        {"ph": "C", "name": "memory", "pid": 2, "tid": 0, "ts": Decimal("1234.567"),
         "args": {"bytes": 1 << 40}},
    ]  # fmt: skip


MOST_NS = 2**43 * 1000 - 1


@given(st.integers(0, MOST_NS), st.integers(0, MOST_NS))
def test_times_come_back_exactly(tmp_path_factory, start_ns, duration_ns):
    path = tmp_path_factory.mktemp("trace") / "out.json"
    spans = (span(0, "s", "n", start_ns, start_ns + duration_ns),)
    events = trace_of(Timeline(origin=MEASURED, spans=spans), path)["traceEvents"]
    assert events[-1]["ts"] * 1000 == start_ns
    assert events[-1]["dur"] * 1000 == duration_ns


def test_names_may_hold_anything(tmp_path):
    name = 'h.0."attn"\\\n</script>'
    timeline = Timeline(origin=MEASURED, spans=(span(0, "s", name, 0, 1),))
    assert trace_of(timeline, tmp_path / "out.json")["traceEvents"][-1]["name"] == name


def test_nothing_happened(tmp_path):
    trace = trace_of(Timeline(origin=SIMULATED, spans=()), tmp_path / "out.json")
    assert trace["traceEvents"] == []


def test_a_folder_that_is_not_there_is_bad_input(tmp_path):
    with pytest.raises(InputError, match="its folder does not exist"):
        write_trace(Timeline(origin=SIMULATED, spans=()), tmp_path / "no" / "out.json", "t")
    assert list(tmp_path.iterdir()) == []
