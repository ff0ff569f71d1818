"""Orders of rows as text, and there and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.planner.errors import PlanError
from claw_plan.planner.vocabulary_parallel_order import RowOrder, rows_of_text, rows_text


@given(st.permutations(range(12)))
def test_text_and_order_lead_back(rows):
    assert rows_of_text(rows_text(rows)) == rows
    order, whole = RowOrder(tuple(rows)), torch.arange(24).view(12, 2)
    assert order.select(whole, 0).tolist() == [[2 * row, 2 * row + 1] for row in rows]
    assert torch.equal(order.restore(order.select(whole, 0), 0), whole)
    assert order.places(torch.tensor([rows[3], rows[0]])).tolist() == [3, 0]


def test_neighbours_are_one_run():
    assert rows_text([4, 0, 1, 2, 3, 5]) == "4,0-3,5"


@pytest.mark.parametrize("text", ["0-3,x", "1-3", "0,0", "0-2,4", "-1"])
def test_what_is_no_order_is_refused(text):
    with pytest.raises(PlanError, match=r"^vocabulary_rows: "):
        rows_of_text(text)


@pytest.mark.parametrize("index", [-1, 3])
def test_what_lies_outside_the_vocabulary_is_refused(index):
    with pytest.raises(IndexError):
        RowOrder((2, 0, 1)).places(torch.tensor([index]))
