"""The searcher on trees of numbers: no model, no simulator."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from claw_plan.planner.search import Branch, Evaluated, best_first

LEAVES = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), min_size=1, max_size=30)


def leaf(index, bound, time_ns):
    return Branch(bound, (index,), 1, lambda: Evaluated(index, time_ns))


@given(LEAVES, st.integers(1, 5))
def test_finds_the_minimum_and_counts_every_leaf(leaves, fanout):
    """`slack` above the bound is the true time; leaves hang under branches of `fanout`."""
    branches = []
    for start in range(0, len(leaves), fanout):
        part = list(enumerate(leaves))[start : start + fanout]
        members = [leaf(i, bound, bound + slack) for i, (bound, slack) in part]
        least = min(member.bound_ns for member in members)
        branches.append(Branch(least, (start,), len(members), lambda members=members: members))
    outcome = best_first(branches)
    best = min(bound + slack for bound, slack in leaves)
    assert outcome.ranked[0][0] == best
    assert sum(bound < best for bound, _ in leaves) <= len(outcome.ranked) <= len(leaves)
    assert outcome.left == 0
    assert outcome.gap == 0.0


def test_what_does_not_fit_is_counted_and_passed_over():
    outcome = best_first([leaf(0, 1, None), leaf(1, 2, 5), leaf(2, 4, 4), leaf(3, 6, 6)])
    assert [time_ns for time_ns, _ in outcome.ranked] == [4, 5]
    assert (outcome.memory_pruned, outcome.left) == (1, 0)  # the last cannot be faster


def test_a_time_limit_leaves_a_gap():
    """The clock ticks once a look: the second opening is already too late."""
    ticks = iter(range(100))
    outcome = best_first(
        [leaf(0, 50, 100), leaf(1, 60, 70)], time_limit_s=1.5, clock=lambda: float(next(ticks))
    )
    assert [time_ns for time_ns, _ in outcome.ranked] == [100]
    assert (outcome.gap, outcome.left) == (0.4, 1)  # the unseen leaf may be as fast as 60


def test_equal_times_keep_the_order_given():
    outcome = best_first([leaf(1, 0, 7), leaf(0, 0, 7)])
    assert [index for _, index in outcome.ranked] == [0, 1]


def test_what_was_ruled_out_together_is_counted_together():
    many = Branch(1, (), 9, lambda: Evaluated(None, None, 9))
    outcome = best_first([many, leaf(1, 2, 5)])
    assert ([*outcome.ranked], outcome.memory_pruned, outcome.left) == ([(5, 1)], 9, 0)


def test_what_is_known_ends_the_search_early():
    """A branch that cannot be faster is not opened; of equal times what was opened comes first."""
    outcome = best_first([leaf(1, 4, 5), leaf(2, 6, 6)], known=[(5, 0)])
    assert outcome.ranked == ((5, 1), (5, 0)) and outcome.left == 0


def test_with_a_limit_only_shorter_times_are_looked_for():
    outcome = best_first([leaf(0, 3, 9), leaf(1, 5, 6), leaf(2, 7, 8)], limit_ns=7)
    assert [*outcome.ranked] == [(6, 1), (9, 0)] and outcome.gap == 0.0
    assert best_first([leaf(0, 7, 8)], limit_ns=7).ranked == ()
