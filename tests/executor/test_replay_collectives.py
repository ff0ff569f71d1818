from __future__ import annotations

from typing import Any

from claw_plan.executor.replay_collectives import align, match, shifted
from claw_plan.executor.trace_readers.rank_trace import Collective, RankTrace, Step, activities


def collective(start: int, end: int, op: str = "all_reduce", **more: Any) -> Collective:
    values: dict[str, Any] = {
        "bytes": 64,
        "group_size": 2,
        "ranks": (),
        "group": "",
        "stream": "n",
    }
    return Collective(op=op, start_ns=start, end_ns=end, issue_ns=start, **(values | more))


def trace(rank: int, *collectives: Collective, world: int = 2) -> RankTrace:
    return RankTrace(
        source=f"rank{rank}.json",
        rank=rank,
        world_size=world,
        device="",
        is_gpu=True,
        has_timing=True,
        activities=activities([], ()),
        collectives=collectives,
        steps=(Step(number=1, start_ns=0, end_ns=1000),),
    )


def test_waiting_is_told_from_transfer_by_the_last_arrival() -> None:
    (m,) = match([trace(0, collective(10, 110)), trace(1, collective(90, 112))])
    assert m.is_whole and m.can_tell and m.step == 1
    assert (m.waiting_ns(0), m.waiting_ns(1), m.transfer_ns) == (80, 0, 22)
    assert m.sources(0) == (0, 1) and m.met_ns(0) == 90


def test_the_nth_of_a_kind_is_the_same_on_all_ranks() -> None:
    first = trace(0, collective(10, 20), collective(30, 40, bytes=8), collective(50, 60))
    second = trace(1, collective(11, 20), collective(51, 60), collective(70, 80, bytes=8))
    assert [(m.bytes, sorted(m.by_rank)) for m in match([first, second])] == [
        (64, [0, 1]), (8, [0, 1]), (64, [0, 1]),
    ]  # fmt: skip


def test_other_groups_are_other_collectives_and_missing_ranks_are_seen() -> None:
    found = match(
        [trace(0, collective(10, 20, ranks=(0, 1))), trace(1, collective(10, 20, ranks=(1, 2)))]
    )
    assert [m.is_whole for m in found] == [False, False]
    assert [m.waiting_ns(min(m.by_rank)) for m in found] == [0, 0]


def test_a_message_goes_from_one_rank_to_the_other() -> None:
    sender = trace(0, collective(50, 55, "send", group="1F0", peer=1))
    receiver = trace(1, collective(20, 80, "recv", group="1F0", peer=0))
    (m,) = match([sender, receiver])
    assert (m.op, m.group_size, m.is_whole) == ("send", 2, True)
    assert (m.sources(0), m.waiting_ns(0)) == ((0,), 0)
    assert (m.waiting_ns(1), m.transfer_ns) == (30, 30)


def test_outside_of_steps() -> None:
    (m,) = match([trace(0, collective(5000, 5010))])
    assert m.step is None


def test_clocks_that_contradict_are_aligned_by_the_ends() -> None:
    own = [collective(t, t + 10) for t in (100, 200, 300)]
    late = shifted(trace(1, *own), 500)
    traces, said = align([trace(0, *own), late], match([trace(0, *own), late]))
    assert traces[0].collectives[0].end_ns == traces[1].collectives[0].end_ns
    assert traces[1].steps[0].duration_ns == 1000
    assert "0.0005 ms" in said


def test_clocks_that_agree_are_believed() -> None:
    traces = [trace(0, collective(10, 110)), trace(1, collective(90, 112))]
    aligned, said = align(traces, match(traces))
    assert aligned == tuple(traces) and not said
