"""Rows of steps that overlap are 1F1B's over all microbatches of a run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from claw_plan.planner.actions import BACKWARD, FORWARD
from claw_plan.planner.asynchronous import (
    ask_places,
    drain_row,
    in_flight,
    step_row,
    version_of,
)
from claw_plan.planner.schedules import PIPEDREAM_2BW, schedule_actions, schedule_refusal

SIZES = st.tuples(st.integers(1, 6), st.integers(0, 5), st.integers(1, 4))


@given(SIZES)
def test_steps_and_a_drain_are_one_row_of_1f1b(sizes: tuple[int, int, int]) -> None:
    ranks, more, steps = sizes
    count = ranks + more
    rows = schedule_actions("1F1B", ranks, count * steps)
    for rank, row in enumerate(rows):
        own = [step_row(rank, ranks, count, step, fills=step == 0) for step in range(steps)]
        own.append(drain_row(rank, ranks, count, steps - 1))
        assert sum(own, ()) == row


def test_a_step_ends_with_its_last_forward() -> None:
    assert [
        str(action) for action in step_row(0, 2, 3, 0, fills=True)
    ] == "0F0 0F1 0B0 0F2".split()
    texts = [str(action) for action in step_row(0, 2, 3, 1, fills=False)]
    assert texts == "0B1 0F3 0B2 0F4 0B3 0F5".split()
    assert [str(action) for action in drain_row(0, 2, 3, 1)] == ["0B4", "0B5"]


@given(SIZES)
def test_two_versions_are_enough_and_in_flight_is_1f1bs(sizes: tuple[int, int, int]) -> None:
    """Whenever a pass runs, its version is the newest or the one before."""
    ranks, more, steps = sizes
    count = ranks + more
    for rank in range(ranks):
        updates = flying = most = 0
        for step in range(steps):
            for action in step_row(rank, ranks, count, step, fills=step == 0):
                assert updates - 1 <= version_of(action.microbatch // count) <= updates
                flying += 1 if action.kind == FORWARD else -1
                most = max(most, flying)
                updates += action.kind == BACKWARD and action.microbatch % count == count - 1
        assert most == in_flight(rank, ranks) == ranks - rank


def test_fewer_microbatches_than_stages_are_refused_with_what_to_do() -> None:
    assert schedule_refusal(PIPEDREAM_2BW, 4, 4, 1) == ""
    assert "at least as many microbatches as stages" in schedule_refusal(PIPEDREAM_2BW, 4, 3, 1)
    assert "1 stage per rank" in schedule_refusal(PIPEDREAM_2BW, 2, 4, 2)


def test_messages_are_asked_for_one_ahead() -> None:
    """Rank 1 of 2 runs F0 B0 F1 B1 …: it asks for F1 when it takes F0, for F2 at its step."""
    rows = schedule_actions("1F1B", 2, 4)
    places = ask_places(rows, 2)
    assert [places[0, "F", index] for index in range(4)] == [0, 0, 3, 4]
    # Rank 0 runs F0 F1 B0 F2 B1 F3 B2 B3: a gradient's forward must have been sent on.
    assert [places[1, "B", index] for index in range(4)] == [1, 2, 4, 6]
