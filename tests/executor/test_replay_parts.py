from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from claw_plan.executor.replay_collectives import match
from claw_plan.executor.replay_parts import parts_ns
from claw_plan.executor.trace_readers.rank_trace import Collective, RankTrace, Step, activities

Row = tuple[int, int, str, str, int]


def trace(rank: int, rows: list[Row], comm: list[tuple[int, int]]) -> RankTrace:
    return RankTrace(
        source="t",
        rank=rank,
        world_size=2,
        device="",
        is_gpu=True,
        has_timing=True,
        activities=activities(rows, ("k",)),
        collectives=tuple(
            Collective(
                op="all_reduce", bytes=8, group_size=2, ranks=(0, 1), group="", start_ns=start,
                end_ns=end, issue_ns=start, stream="n",
            )
            for start, end in comm
        ),
        steps=(Step(number=0, start_ns=0, end_ns=100),),
    )  # fmt: skip


def test_each_instant_counts_once() -> None:
    own = trace(
        0,
        [
            (0, 20, "gemm", "forward", 0),
            (10, 20, "memory", "forward", 0),  # beside the product: 25 to 10 of the 25
            (35, 40, "gemm", "backward", 0),
            (90, 96, "input", "other", 0),
        ],
        [(30, 60)],
    )
    other = trace(1, [], [(50, 60)])
    # Computing 0-20 and 35-40, waiting 30-35 and 40-50, transfer 50-60, input 90-96.
    assert parts_ns(own, match([own, other]), 0, 100) == {
        "gemm": 18, "memory": 7, "waiting": 15, "transfer_exposed": 10, "input": 6, "idle": 44,
    }  # fmt: skip
    alone = parts_ns(own, match([own]), 0, 100)
    assert (alone["communication_exposed"], "waiting" in alone) == (25, False)


PAIR = st.tuples(st.integers(0, 120), st.integers(0, 120)).map(sorted).map(tuple)
ROWS = st.lists(
    st.builds(
        lambda pair, kind: (pair[0], pair[1], kind, "forward", 0),
        PAIR,
        st.sampled_from(["gemm", "memory", "input"]),
    ),
    max_size=6,
)


@given(ROWS, st.lists(PAIR, max_size=3), st.lists(PAIR, max_size=3))
def test_parts_add_up_and_none_is_negative(
    rows: list[Row], first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    own, other = trace(0, rows, first), trace(1, [], second)
    parts = parts_ns(own, match([own, other]), 10, 100)
    assert sum(parts.values()) == 90
    assert min(parts.values()) >= 0
