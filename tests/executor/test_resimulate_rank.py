from __future__ import annotations

from claw_plan.executor.replay_collectives import match
from claw_plan.executor.resimulate_rank import RankTask, rank_tasks
from claw_plan.executor.trace_readers.rank_trace import Collective, RankTrace, Step, activities

MS = 1_000_000
Row = tuple[int, int, str, str, int]


def tasks(
    rows: list[Row], comm: list[tuple[int, int, str]], end: int, begin: int = 0
) -> list[RankTask]:
    trace = RankTrace(
        source="t",
        rank=0,
        world_size=1,
        device="",
        is_gpu=True,
        has_timing=True,
        activities=activities([(s * MS, e * MS, k, p, n) for s, e, k, p, n in rows], ("k",)),
        collectives=tuple(
            Collective(
                op="all_reduce", bytes=8, group_size=1, ranks=(0,), group="", start_ns=s * MS,
                end_ns=e * MS, issue_ns=s * MS, stream=stream,
            )
            for s, e, stream in comm
        ),
        steps=(Step(number=0, start_ns=0, end_ns=end * MS),),
    )  # fmt: skip
    return rank_tasks(trace, match([trace]), trace.steps[0], begin * MS)


def said(found: list[RankTask]) -> list[tuple[str, int, int | None, tuple[int, ...]]]:
    return [(task.name.split()[0], task.duration_ns // MS, task.after_task, task.after)
            for task in found]  # fmt: skip


def test_a_rank_that_waits_for_a_collective() -> None:
    rows: list[Row] = [(0, 10, "gemm", "forward", 0), (30, 40, "gemm", "backward", 0)]
    assert said(tasks(rows, [(10, 30, "a")], 45)) == [
        ("forward", 10, None, ()),
        ("all_reduce", 20, 0, ()),
        ("backward", 10, None, (0,)),
        ("host", 5, None, ()),
    ]


def test_a_collective_beside_computation_cuts_it_and_is_waited_for_by_the_optimizer() -> None:
    rows: list[Row] = [(0, 40, "gemm", "backward", 0), (40, 50, "optimizer", "optimizer", 0)]
    assert said(tasks(rows, [(10, 30, "a")], 50)) == [
        ("backward", 10, None, ()),
        ("all_reduce", 20, 0, ()),
        ("backward", 30, None, ()),
        ("optimizer", 10, None, (0,)),
    ]


def test_a_pause_that_no_collective_ends_is_the_hosts() -> None:
    rows: list[Row] = [(0, 10, "gemm", "forward", 0), (30, 40, "gemm", "forward", 0)]
    # It ends at 15, but the rank goes on at 30 only.
    assert said(tasks(rows, [(5, 15, "a")], 40)) == [
        ("forward", 5, None, ()),
        ("all_reduce", 10, 0, ()),
        ("forward", 5, None, ()),
        ("host", 20, None, ()),
        ("forward", 10, None, ()),
    ]


def test_collectives_in_a_row_wait_for_each_other() -> None:
    rows: list[Row] = [(0, 10, "gemm", "forward", 0), (50, 60, "gemm", "forward", 0)]
    assert said(tasks(rows, [(10, 30, "a"), (30, 50, "b")], 60)) == [
        ("forward", 10, None, ()),
        ("all_reduce", 20, 0, ()),
        ("all_reduce", 20, 0, (0,)),
        ("forward", 10, None, (0, 1)),
    ]


def test_a_step_that_begins_after_the_first_ranks() -> None:
    rows: list[Row] = [(0, 10, "gemm", "forward", 0)]
    assert said(tasks(rows, [], 10, begin=-5)) == [
        ("host", 5, None, ()),
        ("forward", 10, None, ()),
    ]
