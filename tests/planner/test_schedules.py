from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from claw_plan.planner.errors import PlanError
from claw_plan.planner.schedules import (
    INTERLEAVED,
    Action,
    Rows,
    action_needs,
    check_actions,
    in_flight,
    interleaved_ahead,
    parse_action,
    read_schedule_csv,
    schedule_actions,
    write_schedule_csv,
)
from claw_plan.profiles.errors import InputError
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
    task_of: dict[Action, int] = {}
    todo = [list(row) for row in rows]
    while any(todo):
        for rank, row in enumerate(todo):
            while row and all(need in task_of for need in action_needs(row[0], num_stages)):
                action = row.pop(0)
                needs = []
                for need in action_needs(action, num_stages):
                    arrived = task_of[need]
                    if need.stage != action.stage and latency_ns:
                        wire = builder.stream("wire", rank)  # one each: latency, no contention
                        arrived = builder.add(
                            wire, latency_ns, [arrived], kind="pp_comm", name="send"
                        )
                    needs.append(arrived)
                task_of[action] = builder.add(
                    computes[rank], times_ns[action.kind], needs, kind="other", name=str(action)
                )
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


def torchs_interleaved(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[str]:
    """The rows torch computes, without the pauses it pads them with."""
    schedule = ScheduleInterleaved1F1B.__new__(ScheduleInterleaved1F1B)
    schedule.pp_group_size, schedule.n_local_stages = num_ranks, stages_per_rank
    schedule._n_microbatches = num_microbatches
    rounds = max(1, num_microbatches // num_ranks)
    schedule.microbatches_per_round = num_microbatches // rounds
    rows = [schedule._calculate_single_rank_operations(rank) for rank in range(num_ranks)]
    return [" ".join(str(action) for action in row if action is not None) for row in rows]


def rounds_are_whole(num_ranks: int, num_microbatches: int) -> bool:
    return num_microbatches % max(1, num_microbatches // num_ranks) == 0


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("stages_per_rank", [1, 2, 3, 5])
def test_interleaved_rows_are_torchs(num_ranks, stages_per_rank):
    counts = [m for m in range(1, 41) if rounds_are_whole(num_ranks, m)]
    assert counts
    for m in counts:
        rows = schedule_actions(INTERLEAVED, num_ranks, m, stages_per_rank)
        assert text(rows) == torchs_interleaved(num_ranks, m, stages_per_rank)


def test_the_text_of_interleaved():
    assert text(schedule_actions(INTERLEAVED, 2, 2, 2)) == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    ]


@given(st.integers(1, 8), st.integers(1, 40), st.integers(1, 5))
def test_interleaved_rows_get_through(num_ranks, num_microbatches, stages_per_rank):
    if not rounds_are_whole(num_ranks, num_microbatches):
        with pytest.raises(PlanError, match=f"take a multiple of {num_ranks}"):
            schedule_actions(INTERLEAVED, num_ranks, num_microbatches, stages_per_rank)
        return
    rows = schedule_actions(INTERLEAVED, num_ranks, num_microbatches, stages_per_rank)
    check_actions(rows, num_ranks * stages_per_rank, num_microbatches)
    for rank, row in enumerate(rows):
        first = next(place for place, action in enumerate(row) if action.kind == "B")
        ahead = interleaved_ahead(rank, num_ranks, num_microbatches, stages_per_rank)
        everything = num_microbatches * stages_per_rank
        # In the steady state a forward comes before each backward, the first one's included.
        assert first == min(ahead + 1, everything)


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


def test_what_interleaving_takes():
    with pytest.raises(PlanError, match="1F1B has one stage per rank, but got stages_per_rank=2"):
        schedule_actions("1F1B", 2, 4, 2)
    with pytest.raises(PlanError, match="at least one of each"):
        schedule_actions(INTERLEAVED, 2, 4, 0)


@given(st.sampled_from(NAMES), st.integers(1, 12), st.integers(1, 40))
def test_in_flight_is_what_the_rows_hold(name, num_stages, num_microbatches):
    rows = schedule_actions(name, num_stages, num_microbatches)
    check_actions(rows, num_stages, num_microbatches)
    for stage, row in enumerate(rows):
        held = most = 0
        for action in row:
            held += 1 if action.kind == "F" else -1
            most = max(most, held)
        assert held == 0
        assert most == in_flight(name, stage, num_stages, num_microbatches)
        if name == "1F1B":
            assert most <= num_stages - stage


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(PlanError, match="no schedule '1f1b'; did you mean '1F1B'"):
        schedule_actions("1f1b", 2, 2)
    with pytest.raises(PlanError, match="known are 1F1B, GPipe"):
        in_flight("Chimera!", 0, 2, 2)


@pytest.mark.parametrize("counts", [(0, 4), (2, 0), (-1, 4)])
def test_there_is_a_stage_and_a_microbatch(counts):
    with pytest.raises(PlanError, match="at least one"):
        schedule_actions("GPipe", *counts)


@given(st.integers(0, 999), st.sampled_from("FB"), st.integers(0, 9999))
def test_an_action_reads_as_it_is_written(stage, kind, microbatch):
    action = Action(stage, kind, microbatch)
    assert parse_action(str(action)) == action
    assert parse_action(f" {action}\t") == action


@pytest.mark.parametrize(
    "cell",
    ["0f0", "0X0", "0SEND_F0", "0F0 then more", "0F", "F0", "", "-1F0", "0F-1", "0I0", "0W0",
     "0F٣", "(0F4;3B1)OVERLAP_F_B", "1.0F0", "0F0,0F1", "9" * 5000 + "F0"],
)  # fmt: skip
def test_anything_else_is_no_action(cell):
    with pytest.raises(PlanError, match="as in 2F0"):
        parse_action(cell)


FIRST = "0F0 0F1 0F2 0B0 0B1 0B2"
SECOND = "1F0 1F1 1F2 1B0 1B1 1B2"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["0F0 0F1 0F2 0B0 0B1", SECOND], "missing: 0B2"),
        ([FIRST], "missing: 1F0, 1F1, 1F2, 1B0, 1B1 and 1 more"),
        ([FIRST, SECOND + " 0F0"], "stage 0 is on rank 0 and, by 0F0, on rank 1"),
        ([FIRST + " " + SECOND, ""], "row 1 of 2 is empty"),
        (["0B0 0F0 0F1 0F2 0B1 0B2", SECOND], "rank 0: 0B0 comes before its forward"),
        (["0F0 0B0 0F1 0F2 0B1 0B2", SECOND], "its ranks wait: rank 0 at 0B0, rank 1 at 1F1"),
        (["0F0 " + FIRST, SECOND], "repeated: 0F0"),
        ([FIRST + " 0B0", SECOND], "repeated: 0B0"),
        (["0F0 0F1 0F2 0B0 0B0 0B2", SECOND], "repeated: 0B0"),
        ([FIRST.replace("2", "3"), SECOND.replace("2", "3")], "0F3: the microbatches are 0 to 2"),
        ([FIRST, SECOND.replace("1F", "2F")], "2F0: the stages are 0 to 1"),
    ],
)
def test_rows_that_would_train_wrong_are_refused(rows, message):
    actions = [[parse_action(cell) for cell in row.split()] for row in rows]
    with pytest.raises(PlanError, match=message):
        check_actions(actions, 2, 3)


def test_an_action_of_another_kind_is_refused():
    with pytest.raises(PlanError, match="an action is F or B, but got 'I'"):
        check_actions([[Action(0, "I", 0)]], 1, 1)


def test_two_stages_on_a_rank_and_another_order_may_be_right():
    rows = [[parse_action(cell) for cell in "0F1 1F1 1B1 0B1 0F0 1F0 1B0 0B0".split()]]
    check_actions(rows, 2, 2)


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_file_reads_as_it_was_written(tmp_path, name):
    rows, path = schedule_actions(name, 3, 5), tmp_path / "plan.schedule.csv"
    write_schedule_csv(rows, path)
    assert read_schedule_csv(path, 3, 5) == rows
    assert path.read_text().splitlines()[2].startswith("2F0,2")


def test_empty_cells_are_pauses(tmp_path):
    path = tmp_path / "plan.schedule.csv"
    path.write_text("0F0,, 0B0 \n,1F0,1B0\n")
    assert text(read_schedule_csv(path, 2, 1)) == ["0F0 0B0", "1F0 1B0"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("0F0,0B0\n1F0,1X0\n", "plan.schedule.csv, line 2, cell 2: an action is"),
        ("0F0,0B0\n", "plan.schedule.csv: 2 stages run each of 1 microbatches"),
        ("0F0,0B0\n1F0,1B0\n\n", "plan.schedule.csv: every rank has actions, but row 2"),
        ("", "missing: 0F0"),
        ('"0F0' + "x" * 200_000 + '"', "the rows are no CSV"),
    ],
)
def test_a_bad_file_is_named_with_the_place(tmp_path, content, message):
    path = tmp_path / "plan.schedule.csv"
    path.write_text(content)
    with pytest.raises(PlanError, match=message):
        read_schedule_csv(path, 2, 1)


def test_a_missing_file_is_bad_input(tmp_path):
    with pytest.raises(InputError, match="there is no file"):
        read_schedule_csv(tmp_path / "plan.schedule.csv", 2, 1)
