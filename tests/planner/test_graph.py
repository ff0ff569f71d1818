"""Amounts and the sums a ModelGraph answers with."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from claw_plan.planner.graph import Amount

AMOUNTS = st.builds(Amount, *[st.integers(0, 10**9)] * 4)


def test_an_amount_at_a_size():
    """1 + 2 b + (3 + 5 b) / tp, the last rounded up: b = 4 gives 9 + 23 / tp."""
    amount = Amount(1, 2, 3, 5)
    assert [amount.at(4, tp) for tp in (1, 2, 4, 8)] == [32, 21, 15, 12]


@given(AMOUNTS, AMOUNTS, st.integers(1, 64))
def test_sums_are_exact_without_division(one, other, batch):
    assert (one + other).at(batch) == one.at(batch) + other.at(batch)


@given(AMOUNTS, st.integers(1, 64), st.integers(1, 16))
def test_grows_with_the_batch_and_not_with_the_degree(amount, batch, tp):
    assert amount.at(batch, tp) <= amount.at(batch + 1, tp)
    assert amount.at(batch, tp + 1) <= amount.at(batch, tp)


def test_flops_of_the_toy(toys):
    """Blocks of 1000, a prologue of 100, an epilogue of 2000; backward twice as many."""
    graph = toys.graph(layers=4)
    assert graph.flops(3) == (3 * 6100, 6 * 6100)
    assert graph.num_parameters == 64 * 8 + 4 * 64
    assert [unit.name for unit in graph.blocks] == [f"blocks.{i}" for i in range(4)]
