from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from claw_plan.executor.trace_readers.rank_trace import KINDS, RankTrace
from claw_plan.executor.trace_readers.run_timeline import (
    read_timeline_members,
    recorded_steps_ns,
    unusual,
    usual_step_ns,
)
from claw_plan.profiles.errors import InputError
from claw_plan.simulator.timeline import Span


def span(rank: int, kind: str, name: str, start: int, end: int, **more: Any) -> dict[str, Any]:
    made = Span(rank=rank, stream="s", kind=kind, name=name, start_ns=start, end_ns=end, **more)
    as_written: dict[str, Any] = json.loads(json.dumps(made._asdict()))
    return as_written


def read(*spans: Any) -> list[RankTrace]:
    return read_timeline_members([("spans", one) for one in spans], "timeline.json")


def test_spans_become_passes_and_collectives() -> None:
    (trace,) = read(
        span(0, "forward", "f", 0, 10),
        span(0, "dp_comm", "all_reduce", 10, 15, bytes=64, group=(0,)),
        span(0, "recompute", "r", 15, 20),
        span(0, "optimizer", "adamw", 20, 22),
    )
    assert [KINDS[kind] for kind in trace.activities.kind.tolist()] == [
        "forward", "recompute", "optimizer",
    ]  # fmt: skip
    (one,) = trace.collectives
    assert (one.op, one.bytes, one.group_size, one.start_ns) == ("all_reduce", 64, 1, 10)
    assert trace.steps[0].end_ns == 22


def test_a_wait_in_a_pipeline_is_a_message_from_the_same_place_of_the_other_stage() -> None:
    traces = read(
        span(0, "forward", "0F0", 0, 10), span(1, "forward", "0F0", 0, 12),
        span(2, "pp_comm", "wait for 1F0", 0, 13), span(2, "forward", "1F0", 13, 20),
        span(3, "pp_comm", "wait for 1F0", 0, 14), span(3, "forward", "1F0", 14, 20),
        span(3, "backward", "1B0", 20, 30), span(1, "pp_comm", "wait for 0B0", 12, 31),
    )  # fmt: skip
    said = [
        sorted((one.op, one.group, one.peer, one.start_ns) for one in trace.collectives)
        for trace in traces
    ]
    assert said == [
        [("send", "1F0", 2, 10)],
        [("recv", "0B0", 3, 12), ("send", "1F0", 3, 12)],
        [("recv", "1F0", 0, 0)],
        [("recv", "1F0", 1, 0), ("send", "0B0", 1, 30)],
    ]


def test_broken_spans_are_left_out_and_nothing_else_is_refused() -> None:
    whole = span(0, "forward", "f", 0, 10)
    (trace,) = read(whole, whole | {"end_ns": -1}, whole | {"rank": "x"}, 7)
    assert trace.warnings == ("3 spans are broken: left out",)
    with pytest.raises(InputError, match="holds no recorded step"):
        read()


def test_recorded_steps_have_their_times_in_steps_jsonl(tmp_path: Path) -> None:
    assert recorded_steps_ns(tmp_path) == {}
    lines = [
        '{"step": 2, "way": "plain", "step_time_ms": 1}',
        "junk",
        '{"step": 3, "way": "timeline", "step_time_ms": 2.5}',
        '{"step": 7, "way": "timeline", "step_time_ms": NaN}',
        '{"step": "x", "way": "timeline", "step_time_ms": 1}',
        '{"step": 9, "way": "timeline", "step_time_ms": 3}',
    ]
    (tmp_path / "steps.jsonl").write_text("\n".join(lines))
    assert recorded_steps_ns(tmp_path) == {3: 2_500_000, 9: 3_000_000}


def test_steps_lie_one_after_the_other_on_all_ranks() -> None:
    spans = [
        span(0, "forward", "f", 0, 10) | {"step": 3},
        span(1, "forward", "f", 0, 12) | {"step": 3},
        span(0, "dp_comm", "all_reduce", 2, 5, bytes=8, group=(0, 1)) | {"step": 7},
        span(1, "dp_comm", "all_reduce", 1, 6, bytes=8, group=(0, 1)) | {"step": 7},
    ]
    members = [("spans", one) for one in spans]
    first, second = read_timeline_members(members, "timeline.json", {7: 9})
    assert [(s.number, s.start_ns, s.end_ns) for s in first.steps] == [(3, 0, 10), (7, 12, 21)]
    assert [(s.number, s.start_ns, s.end_ns) for s in second.steps] == [(3, 0, 12), (7, 12, 21)]
    assert (first.collectives[0].start_ns, second.collectives[0].end_ns) == (14, 18)


def test_too_many_steps_are_refused() -> None:
    with pytest.raises(InputError, match="has more than 256 steps"):
        read(*(span(0, "forward", "f", 0, 1) | {"step": step} for step in range(300)))


def test_an_impossible_size_is_not_believed() -> None:
    (trace,) = read(span(0, "dp_comm", "all_reduce", 10, 15) | {"bytes": 10**400})
    assert trace.collectives[0].bytes is None


def test_a_recorded_step_unlike_the_others_is_said(tmp_path: Path) -> None:
    assert usual_step_ns(tmp_path) is None
    (tmp_path / "result.json").write_text('{"step_time_ms": {"median": 2.0}}')
    assert usual_step_ns(tmp_path) == 2_000_000
    (tmp_path / "result.json").write_text("[1]")
    assert usual_step_ns(tmp_path) is None
    assert unusual([2_090_000], 2_000_000) == unusual([5], None) == unusual([], 5) == ()
    said = unusual([9_000_000, 2_200_000, 1], 2_000_000)
    assert "the median of 3 recorded steps took 2.2 ms, but the run's median step 2 ms" in said[0]
