from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.planner.actions import Rows, message_for, message_of, own_before
from claw_plan.planner.errors import PlanError
from claw_plan.planner.schedule_check import check_actions
from claw_plan.planner.schedules import (
    INTERLEAVED,
    SCHEDULES,
    held_by_rank,
    least_in_flight,
    rank_of_stage,
    schedule_actions,
    schedule_refusal,
    stages_of_rank,
)
from claw_plan.simulator.engine import finish_times_ns
from claw_plan.simulator.task_graph import TaskGraph, TaskGraphBuilder

NAMES = ("GPipe", "1F1B")


def text(rows: Rows) -> list[str]:
    return [" ".join(map(str, row)) for row in rows]


def graph_of(rows: Rows, times_ns: dict[str, int], latency_ns: int = 0) -> TaskGraph:
    """Uniform stages; a result reaches another stage `latency_ns` after it is there."""
    builder = TaskGraphBuilder()
    num_stages = len({action.stage for row in rows for action in row})
    computes = [builder.stream("compute", rank) for rank in range(len(rows))]
    sent: dict[object, int] = {}
    todo = [list(row) for row in rows]
    while any(todo):
        for rank, row in enumerate(todo):
            while row and (message_for(row[0], num_stages) or "none") in {*sent, "none"}:
                action = row.pop(0)
                needs = []
                message = message_for(action, num_stages)
                if message is not None and latency_ns:
                    wire = builder.stream("wire", rank)  # one each: latency, no contention
                    needs.append(
                        builder.add(wire, latency_ns, [sent[message]], kind="pp_comm", name="send")
                    )
                elif message is not None:
                    needs.append(sent[message])
                before = own_before(action)
                needs += [sent[before]] if before is not None else []
                task = builder.add(
                    computes[rank], times_ns[action.kind], needs, kind="other", name=str(action)
                )
                sent[action] = sent[message_of(action)] = task
    return builder.build()


def makespan(rows: Rows, times_ns: dict[str, int], latency_ns: int = 0) -> int:
    return int(finish_times_ns(graph_of(rows, times_ns, latency_ns))[1].max())


def test_the_text_of_gpipe():
    assert text(schedule_actions("GPipe", 2, 3)) == [
        "0F0 0F1 0F2 0B0 0B1 0B2",
        "1F0 1F1 1F2 1B0 1B1 1B2",
    ]


def test_the_text_of_1f1b():
    assert text(schedule_actions("1F1B", 3, 4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_1f1b_with_fewer_microbatches_than_stages():
    assert text(schedule_actions("1F1B", 3, 1)) == ["0F0 0B0", "1F0 1B0", "2F0 2B0"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 5, 8, 16, 32])
def test_bubble_of_uniform_stages(name, num_stages, num_microbatches):
    """Span (m+p-1)(F+B), so each stage idles (p-1)(F+B); for m < p too."""
    p, m, f, b = num_stages, num_microbatches, 1000, 2100
    rows = schedule_actions(name, p, m)
    start, finish = finish_times_ns(graph_of(rows, {"F": f, "B": b}))
    assert finish.max() == (m + p - 1) * (f + b)
    work = m * (f + b)
    assert finish.max() - work == (p - 1) * (f + b)
    graph = graph_of(rows, {"F": f, "B": b})
    for stage in range(p):  # a stage's own span is shorter by the skew s(F+B)
        mine = graph.stream == stage
        assert finish[mine].max() - start[mine].min() == (m + p - 1 - stage) * (f + b)


@pytest.mark.parametrize("num_stages", [2, 4, 8, 16])
@pytest.mark.parametrize("per_stage", [1, 2, 4, 7])
def test_what_1f1b_pays_for_latency(num_stages, per_stage):
    """c [2(p-1)(m/p + 1) - 2] with F = 1, B = 2, c = 0.05: not proven, but simulated."""
    p, m, c = num_stages, num_stages * per_stage, 50
    rows, times = schedule_actions("1F1B", p, m), {"F": 1000, "B": 2000}
    extra = makespan(rows, times, c) - makespan(rows, times)
    assert extra == c * (2 * (p - 1) * (per_stage + 1) - 2)


UNIT = {"F": 1, "I": 1, "W": 1, "B": 2}


def idle_of_ranks(rows: Rows, times_ns: dict[str, int]) -> list[int]:
    """Each rank's span less its work."""
    graph = graph_of(rows, times_ns)
    start, finish = finish_times_ns(graph)
    idle = []
    for rank, row in enumerate(rows):
        mine = graph.stream == rank
        work = sum(times_ns[action.kind] for action in row)
        idle.append(int(finish[mine].max() - start[mine].min()) - work)
    return idle


@pytest.mark.parametrize(
    ("num_ranks", "rounds", "stages_per_rank"),
    [(2, 1, 2), (2, 4, 3), (4, 2, 2), (4, 3, 5), (8, 1, 4), (35, 2, 3)],
)
def test_interleaving_divides_the_bubble(num_ranks, rounds, stages_per_rank):
    """(p-1)(F+B)/v for p | m, F and B of a rank's v stages together (ends at rank 0)."""
    p, v, m = num_ranks, stages_per_rank, num_ranks * rounds
    f, b = 1000, 2100  # of one of the v stages
    rows = schedule_actions(INTERLEAVED, p, m, v)
    assert makespan(rows, {"F": f, "B": b}) == m * v * (f + b) + (p - 1) * (f + b)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize("times", [(1, 1, 1), (10, 12, 8), (10, 11, 10), (20, 21, 17)])
def test_bubble_of_zb1p(num_ranks, rounds, times):
    """(p-1)(F+B-W) with one stage a rank (zero-bubble paper, ZB-H1)."""
    forward, inputs, weights = times
    rows = schedule_actions("InterleavedZeroBubble", num_ranks, num_ranks * rounds)
    idle = idle_of_ranks(rows, {"F": forward, "I": inputs, "W": weights})
    assert max(idle) == (num_ranks - 1) * (forward + inputs - weights)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_the_v_has_no_bubble_from_twice_the_ranks_on(num_ranks):
    """Zero-bubble paper, section 6: F = B = W, m >= 2p."""
    for m in range(2 * num_ranks, 4 * num_ranks + 1):
        rows = schedule_actions("ZBVZeroBubble", num_ranks, m, 2)
        assert idle_of_ranks(rows, UNIT) == [0] * num_ranks


def legal(name, num_ranks, num_microbatches, stages_per_rank):
    return not schedule_refusal(name, num_ranks, num_microbatches, stages_per_rank)


@given(
    st.sampled_from(sorted(SCHEDULES)), st.integers(1, 8), st.integers(1, 40), st.integers(1, 5)
)
def test_all_rows_get_through_and_live_where_they_are_said_to(name, p, m, v):
    if not legal(name, p, m, v):
        with pytest.raises(PlanError):
            schedule_actions(name, p, m, v)
        return
    rows = schedule_actions(name, p, m, v)
    check_actions(rows, p * v, m)
    for rank, row in enumerate(rows):
        stages = stages_of_rank(name, rank, p, v)
        assert {action.stage for action in row} == set(stages)
        assert {rank_of_stage(name, stage, p) for stage in stages} == {rank}


@settings(deadline=None)  # the first call compiles
@given(
    st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 24), st.integers(1, 4)
)
def test_what_is_held_is_what_the_rows_hold(name, p, m, v):
    if not legal(name, p, m, v):
        return
    for rank, row in enumerate(schedule_actions(name, p, m, v)):
        held = most = 0
        for action in row:
            held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
            most = max(most, held)
        assert held == 0
        found = held_by_rank(name, rank, p, m, v)
        assert sum(found.flights) == most
        recomputed = held_by_rank(name, rank, p, m, v, recomputes=True)
        least = least_in_flight(name, p, m, v)[rank]
        assert least <= min(most, sum(recomputed.flights))
        if name in ("1F1B", "Interleaved1F1B"):
            assert least == most
        assert all(late <= held for late, held in zip(found.late, found.flights, strict=True))
        if name == "1F1B":
            assert found.flights == (min(m, p - rank),)
        if name == "GPipe":
            assert found.flights == (m,)


def test_recompute_ends_what_is_held_with_the_first_part():
    """ZB1P on 2 ranks: rank 1 is one I late with its W, rank 0's I is nothing."""
    plain = [held_by_rank("InterleavedZeroBubble", rank, 2, 4) for rank in (0, 1)]
    assert [(held.flights, held.late) for held in plain] == [((2,), (0,)), ((2,), (1,))]
    again = held_by_rank("InterleavedZeroBubble", 1, 2, 4, recomputes=True)
    assert (again.flights, again.late) == ((1,), (0,))


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(PlanError, match="no schedule '1f1b'; did you mean '1F1B'"):
        schedule_actions("1f1b", 2, 2)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        (("GPipe", 0, 4, 1), "at least one of each"),
        (("GPipe", 2, 0, 1), "at least one of each"),
        (("Interleaved1F1B", 2, 4, 0), "at least one of each"),
        (("1F1B", 2, 4, 2), "1F1B has 1 stage per rank, but got stages_per_rank=2"),
        (("Interleaved1F1B", 2, 4, 1), "has at least 2 stages per rank"),
        (("ZBVZeroBubble", 2, 4, 3), "has 2 stages per rank"),
        (("Interleaved1F1B", 4, 9, 2), "9 do not divide by 2; take a multiple of 4"),
        (("InterleavedZeroBubble", 4, 9, 2), "9 do not divide by 2; take a multiple of 4"),
        (("DualPipeV", 4, 7, 2), "7 for 8 stages"),
    ],
)
def test_what_a_schedule_does_not_take(numbers, said):
    with pytest.raises(PlanError, match=said):
        schedule_actions(*numbers)
