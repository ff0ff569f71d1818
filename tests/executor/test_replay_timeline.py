from __future__ import annotations

from claw_plan.executor.replay import replay
from claw_plan.executor.replay_timeline import timeline_of
from claw_plan.executor.trace_readers.rank_trace import Collective, RankTrace, Step, activities


def test_spans_of_the_step_from_its_first_start() -> None:
    one = Collective(
        op="all_reduce", bytes=8, group_size=1, ranks=(0,), group="", start_ns=1060, end_ns=1200,
        issue_ns=1060, stream="9",
    )  # fmt: skip
    rows = [(900, 1010, "gemm", "forward", 0), (1020, 1030, "input", "other", 1)]
    trace = RankTrace(
        source="t",
        rank=0,
        world_size=1,
        device="",
        is_gpu=True,
        has_timing=True,
        activities=activities(rows, ("sgemm", "loader")),
        collectives=(one,),
        steps=(Step(number=4, start_ns=1000, end_ns=1100),),
    )
    timeline = timeline_of(replay([trace]))
    assert timeline.origin == "measured" and timeline.step_time_ns == 100
    assert [(s.stream, s.kind, s.name, s.start_ns, s.end_ns, s.bytes) for s in timeline.spans] == [
        ("compute", "forward", "sgemm", 0, 10, 0),
        ("input", "other", "loader", 20, 30, 0),
        ("communication 9", "dp_comm", "all_reduce", 60, 100, 8),
    ]
