from __future__ import annotations

import pytest

from claw_plan.executor.step_times import (
    APART,
    FRESH,
    MET,
    PLAIN,
    STEADY,
    TIMELINE,
    WARM_UP,
    WORK,
    counted,
    step_times,
    ways_of,
)
from claw_plan.planner.candidate import Candidate

ZERO_ONE = Candidate(dp_replicate=2, codec="zero_one:4")


@pytest.mark.parametrize(
    ("steps", "ways"),
    [
        (1, [PLAIN]),
        (2, [PLAIN] * 2),
        (3, [PLAIN, PLAIN, TIMELINE]),
        (6, [PLAIN, PLAIN, TIMELINE, WORK, WORK, PLAIN]),
        (9, [PLAIN, PLAIN, TIMELINE, WORK, WORK, PLAIN, TIMELINE, PLAIN, TIMELINE]),
    ],
)
def test_most_steps_are_not_looked_at(steps: int, ways: list[str]) -> None:
    assert ways_of(steps) == ways


@pytest.mark.parametrize("steps", [2, 6, 9, 10, 11, 12, 20])
def test_where_the_next_forward_waits_a_plain_step_follows_each_that_waits_for_none(
    steps: int,
) -> None:
    """Of two plain steps in a row the second has both: what is left over, and what it leaves."""
    ways = ways_of(steps, waits=True)
    assert ways[:2] == [PLAIN] * 2
    whole = [step for step in range(1, steps) if ways[step - 1] == ways[step] == PLAIN]
    assert len(whole) == {2: 1, 6: 1, 9: 2, 10: 3, 11: 3, 12: 3}.get(steps, 11)
    assert ways.count(TIMELINE) == (steps > 2) + (steps > 8) + (steps > 10)


def test_recorded_steps_and_the_first_do_not_count() -> None:
    assert counted(ways_of(6), [STEADY] * 6) == [1, 5]
    assert counted([PLAIN], [STEADY]) == [0]


def test_steps_that_wait_for_nothing_do_not_count() -> None:
    """The second of two plain steps counts; as the others are shorter, by what they leave."""
    ways = [PLAIN, PLAIN, TIMELINE, PLAIN, PLAIN]
    phases = [FRESH, STEADY, FRESH, FRESH, STEADY]
    times = step_times(Candidate(dp_replicate=2), ways, phases, [30, 100, 130, 30, 110])
    assert (times.steps_ns, times.typical_ns, times.unlike_plan) == ([100, 110], 105, "")


def test_a_warm_up_does_not_count_where_there_is_more() -> None:
    one_bit = Candidate(dp_replicate=2, codec="one_bit")
    ways, phases = [PLAIN] * 5, [WARM_UP] * 3 + [STEADY] * 2
    times = step_times(one_bit, ways, phases, [900, 800, 800, 100, 120])
    assert (times.steps_ns, times.typical_ns, times.unlike_plan) == ([100, 120], 110, "")
    times = step_times(one_bit, ways[:3], phases[:3], [900, 800, 820])
    assert (times.steps_ns, times.typical_ns) == ([800, 820], 810)
    assert "warm-up" in times.unlike_plan


def test_of_0_1_adam_both_kinds_of_steps_stand_for_a_plan() -> None:
    """Four steps from a meeting to the next: (100 + 3 x 20) / 4."""
    phases = [WARM_UP, MET, MET, APART, MET, APART, APART]
    walls = [900, 90, 110, 20, 100, 10, 30]
    times = step_times(ZERO_ONE, [PLAIN] * 7, phases, walls)
    assert (times.typical_ns, times.unlike_plan) == (40, "")
    too_short = step_times(ZERO_ONE, [PLAIN] * 3, phases[:3], walls[:3])
    assert (too_short.typical_ns, "met in all" in too_short.unlike_plan) == (100, True)
    never_apart = Candidate(dp_replicate=2, codec="zero_one:1")
    assert not step_times(never_apart, [PLAIN] * 3, phases[:3], walls[:3]).unlike_plan
