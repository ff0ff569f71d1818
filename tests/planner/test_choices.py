"""Scores are ranked by what fits, then by time; the budget is kept; everything is enumerated."""

from __future__ import annotations

import numpy as np
import pytest

from claw_plan.planner.choices import Evaluations, Scores, enumerate_all, rank, size_of
from claw_plan.planner.errors import PlanError


class Sum:
    """Time falls and memory grows with the options chosen; more than 3 bytes are too many."""

    sizes = (2, 3)
    start = (0, 0)
    capacity_bytes = 3
    features = np.zeros((2, 3, 1), np.float32)

    def scores(self, assignments):
        total = assignments.sum(1)
        return Scores(100 - 10 * total, np.maximum(0, 2 * total - self.capacity_bytes))

    def solve(self):
        return None


def test_what_fits_comes_before_what_is_faster():
    scores = Scores(np.array([5, 1, 3, 2]), np.array([0, 7, 0, 6]))
    assert rank(scores).tolist() == [2, 0, 3, 1]


def test_every_assignment_is_enumerated_once():
    assert size_of(Sum()) == 6
    rows = [tuple(row) for row in enumerate_all(Sum()).tolist()]
    assert rows == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_too_many_to_enumerate_are_refused_with_what_to_do():
    many = Sum()
    many.sizes = (9,) * 200
    with pytest.raises(PlanError, match=r"more than 10\^190; use --search auto"):
        enumerate_all(many)


def test_the_best_that_fits_is_kept_and_the_budget_ends_the_search():
    evaluations = Evaluations(Sum(), 3)
    assert len(evaluations.ask([(0, 0), (1, 2)]).time_ns) == 2
    # (1, 2) is faster and does not fit: 2 * 3 - 3 bytes are missing.
    assert evaluations.best.assignment == (0, 0) and evaluations.best.fits
    assert len(evaluations.ask([(1, 0), (0, 1)]).time_ns) == 1  # one was left
    best = evaluations.best
    assert (best.assignment, best.time_ns, best.evaluations) == ((1, 0), 90, 3)
    assert evaluations.left == 0


def test_costs_are_relative_to_the_first_time_and_punish_missing_memory():
    evaluations = Evaluations(Sum(), 9)
    scores = evaluations.ask([(0, 0), (1, 0), (1, 2)])
    # 70/100 + 4 * 3/3
    assert evaluations.cost(scores).tolist() == pytest.approx([1.0, 0.9, 4.7])
    assert evaluations.best_cost == pytest.approx(0.9)


def test_a_search_needs_a_budget():
    with pytest.raises(PlanError, match="at least one"):
        _ = Evaluations(Sum(), 0).best
