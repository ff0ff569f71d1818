from __future__ import annotations

import pytest

from claw_plan.executor.replay_collectives import match
from claw_plan.executor.replay_stragglers import stragglers
from claw_plan.executor.trace_readers.rank_trace import Collective, RankTrace, Step, activities

MS = 1_000_000
Row = tuple[int, int, str, str, int]


def trace(rank: int, rows: list[Row], arrivals: list[int], begins: int = 0) -> RankTrace:
    """A rank of four; each collective ends a millisecond after the last arrival, at 200, 400."""
    return RankTrace(
        source="t",
        rank=rank,
        world_size=4,
        device="",
        is_gpu=True,
        has_timing=True,
        activities=activities([(s * MS, e * MS, k, p, n) for s, e, k, p, n in rows], ("k",)),
        collectives=tuple(
            Collective(
                op="all_reduce",
                bytes=8,
                group_size=4,
                ranks=(0, 1, 2, 3),
                group="",
                start_ns=time * MS,
                end_ns=(201 + 200 * number) * MS,
                issue_ns=time * MS,
                stream="n",
            )
            for number, time in enumerate(arrivals)
        ),
        steps=(Step(number=0, start_ns=begins * MS, end_ns=420 * MS),),
    )


def usual(rank: int) -> RankTrace:
    return trace(
        rank, [(0, 50, "gemm", "forward", 0), (201, 250, "gemm", "forward", 0)], [50, 250]
    )


@pytest.mark.parametrize(
    ("rows", "begins", "cause"),
    [
        ([(0, 200, "gemm", "forward", 0), (201, 400, "gemm", "forward", 0)], 0, "compute"),
        (
            [(0, 150, "input", "other", 0), (150, 200, "gemm", "forward", 0),
             (201, 351, "input", "other", 0), (351, 400, "gemm", "forward", 0)],
            0,
            "input",
        ),
        ([(150, 200, "gemm", "forward", 0), (351, 400, "gemm", "forward", 0)], 0, "host"),
    ],
)  # fmt: skip
def test_a_late_rank_is_named_with_its_cause(rows: list[Row], begins: int, cause: str) -> None:
    traces = [usual(0), usual(1), trace(2, rows, [200, 400], begins), usual(3)]
    (one,) = stragglers(traces, match(traces), 420 * MS, 1)
    assert (one.rank, one.cause) == (2, cause)
    assert one.late_ns == 300 * MS and one.share == pytest.approx(300 / 420)


def test_a_rank_that_begins_late() -> None:
    late = trace(2, [(150, 200, "gemm", "forward", 0)], [200, 250], begins=150)
    traces = [usual(0), usual(1), late, usual(3)]
    (one,) = stragglers(traces, match(traces), 420 * MS, 1)
    assert (one.rank, one.cause) == (2, "late start")


def test_ranks_that_are_late_in_turns_are_none() -> None:
    turns = [[200, 250], [50, 400]]
    rows: list[Row] = [(0, 50, "gemm", "forward", 0)]
    traces = [trace(rank, rows, arrivals) for rank, arrivals in enumerate(turns)]
    assert stragglers(traces, match(traces), 420 * MS, 1) == ()


def test_one_rank_alone_has_none() -> None:
    assert stragglers([usual(0)], match([usual(0)]), 420 * MS, 1) == ()
