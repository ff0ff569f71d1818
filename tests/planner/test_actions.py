from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.planner.actions import (
    Action,
    message_for,
    message_of,
    own_before,
    parse_action,
)
from claw_plan.planner.errors import PlanError


@given(st.integers(0, 999), st.sampled_from("FBIW"), st.integers(0, 9999))
def test_an_action_reads_as_it_is_written(stage, kind, microbatch):
    action = Action(stage, kind, microbatch)
    assert parse_action(str(action)) == action
    assert parse_action(f" {action}\t") == action


@pytest.mark.parametrize(
    "cell",
    ["0f0", "0X0", "0SEND_F0", "0F0 then more", "0F", "F0", "", "-1F0", "0F-1", "0R0", "0b0",
     "0F٣", "(0F4;3B1)OVERLAP_F_B", "1.0F0", "0F0,0F1", "9" * 5000 + "F0"],
)  # fmt: skip
def test_anything_else_is_no_action(cell):
    with pytest.raises(PlanError, match="as in 2F0"):
        parse_action(cell)


def test_who_waits_for_whom_in_a_chain_of_three():
    def needs(text):
        return message_for(parse_action(text), 3)

    assert (needs("0F4"), needs("1F4")) == (None, (0, "F", 4))
    assert (needs("2B4"), needs("1B4"), needs("1I4")) == (None, (2, "B", 4), (2, "B", 4))
    assert needs("1W4") is None
    assert message_of(Action(2, "I", 4)) == message_of(Action(2, "B", 4)) == (2, "B", 4)
    assert (message_of(Action(2, "W", 4)), message_of(Action(2, "F", 4))) == (None, (2, "F", 4))
    assert (own_before(Action(1, "W", 4)), own_before(Action(1, "I", 4))) == (
        (1, "I", 4),
        (1, "F", 4),
    )
    assert own_before(Action(1, "F", 4)) is None
