from __future__ import annotations

import pytest

from claw_plan.planner.actions import Action, Rows, parse_action
from claw_plan.planner.errors import PlanError
from claw_plan.planner.schedule_check import (
    check_actions,
    read_schedule_csv,
    write_schedule_csv,
)
from claw_plan.planner.schedules import schedule_actions
from claw_plan.profiles.errors import InputError


def text(rows: Rows) -> list[str]:
    return [" ".join(map(str, row)) for row in rows]


FIRST = "0F0 0F1 0F2 0B0 0B1 0B2"
SECOND = "1F0 1F1 1F2 1B0 1B1 1B2"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["0F0 0F1 0F2 0B0 0B1", SECOND], "missing: 0B2"),
        ([FIRST], "missing: 1F0, 1B0, 1F1, 1B1, 1F2 and 1 more"),
        ([FIRST, SECOND + " 0F0"], "stage 0 is on rank 0 and, by 0F0, on rank 1"),
        ([FIRST + " " + SECOND, ""], "row 1 of 2 is empty"),
        (["0B0 0F0 0F1 0F2 0B1 0B2", SECOND], "rank 0: 0B0 comes before its forward"),
        (["0F0 0B0 0F1 0F2 0B1 0B2", SECOND], "its ranks wait: rank 0 at 0B0, rank 1 at 1F1"),
        (["0F0 " + FIRST, SECOND], "repeated: 0F0"),
        ([FIRST + " 0B0", SECOND], "repeated: 0B0"),
        (["0F0 0F1 0F2 0B0 0B0 0B2", SECOND], "repeated: 0B0"),
        ([FIRST.replace("2", "3"), SECOND.replace("2", "3")], "0F3: the microbatches are 0 to 2"),
        ([FIRST, SECOND.replace("1F", "2F")], "2F0: the stages are 0 to 1"),
        ([FIRST.replace("0B0", "0I0"), SECOND], "missing: 0W0"),
        ([FIRST.replace("0B0", "0W0"), SECOND], "missing: 0I0"),
        ([FIRST + " 0I0", SECOND], "repeated: 0I0 beside 0B0"),
        ([FIRST.replace("0B0", "0W0 0I0"), SECOND], "rank 0: 0W0 comes before its I"),
    ],
)
def test_rows_that_would_train_wrong_are_refused(rows, message):
    actions = [[parse_action(cell) for cell in row.split()] for row in rows]
    with pytest.raises(PlanError, match=message):
        check_actions(actions, 2, 3)


def test_an_action_of_another_kind_is_refused():
    with pytest.raises(PlanError, match="an action is one of F, B, I, W, not 'X'"):
        check_actions([[Action(0, "X", 0)]], 1, 1)


def test_weight_gradients_may_come_late():
    rows = [[parse_action(cell) for cell in "0F0 0F1 0I0 0I1 0W1 0W0".split()]]
    check_actions(rows, 1, 2)


def test_two_stages_on_a_rank_and_another_order_may_be_right():
    rows = [[parse_action(cell) for cell in "0F1 1F1 1B1 0B1 0F0 1F0 1B0 0B0".split()]]
    check_actions(rows, 2, 2)


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "InterleavedZeroBubble"])
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
