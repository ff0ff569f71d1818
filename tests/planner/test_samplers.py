"""The contract of every searcher."""

from __future__ import annotations

import numpy as np
import pytest

from claw_plan.cli import options
from claw_plan.planner.choices import Scores
from claw_plan.planner.errors import PlanError
from claw_plan.planner.samplers import SEARCHERS, check_storage, search_choices

SAMPLERS = [name for name in SEARCHERS if name != "exhaustive"]


class Knapsack:
    """Each item left out costs its worth; those taken must not weigh too much. `solve` is off."""

    def __init__(self, items, capacity_bytes, seed=0):
        rng = np.random.default_rng(seed)
        self.worth, self.weight = rng.integers(10, 99, items), rng.integers(10, 99, items)
        self.sizes, self.start = (2,) * items, (0,) * items
        self.capacity_bytes = capacity_bytes
        ones = np.ones(items)
        self.features = np.stack(
            [np.stack([0 * ones, 0 * ones], 1), np.stack([self.worth, self.weight], 1) / 99.0], 1
        ).astype(np.float32)

    def scores(self, assignments):
        lost = ((1 - assignments) * self.worth).sum(1)
        return Scores(
            1000 + lost, np.maximum(0, (assignments * self.weight).sum(1) - self.capacity_bytes)
        )

    def solve(self):
        return None


def brute(problem):
    items = len(problem.sizes)
    rows = np.array(np.meshgrid(*[[0, 1]] * items)).reshape(items, -1).T
    scores = problem.scores(rows)
    return int(scores.time_ns[scores.excess_bytes == 0].min())


@pytest.mark.parametrize("name", SEARCHERS)
def test_small_problems_are_solved_exactly(name):
    problem = Knapsack(6, 150)
    answer = search_choices(problem, name, budget=100)
    assert answer.fits and answer.time_ns == brute(problem)


@pytest.mark.parametrize("name", SAMPLERS)
def test_no_worse_than_the_start_and_what_is_known(name):
    problem = Knapsack(40, 800)
    order = np.argsort(-problem.worth / problem.weight)
    taken = order[np.cumsum(problem.weight[order]) <= 800]
    known = tuple(int(item in taken) for item in range(40))
    greedy = int(problem.scores(np.array([known])).time_ns[0])
    answer = search_choices(problem, name, budget=60, known=[known], seed=2)
    assert answer.fits and answer.time_ns <= greedy
    assert answer.evaluations <= 60


@pytest.mark.parametrize("name", SAMPLERS)
def test_each_finds_something_better_by_itself(name):
    problem = Knapsack(14, 350)
    start = int(problem.scores(np.array([problem.start])).time_ns[0])
    answer = search_choices(problem, name, budget=150, seed=1)
    assert answer.fits and answer.time_ns < start


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_same_seed_gives_the_same_answer(name):
    problem = Knapsack(30, 600)
    answers = [search_choices(problem, name, budget=60, seed=5) for _ in range(2)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["anneal", "rl", "nsga2"])
def test_seeds_differ(name):
    problem = Knapsack(30, 600)
    found = {search_choices(problem, name, budget=60, seed=seed).assignment for seed in range(4)}
    assert len(found) > 1


def test_auto_takes_the_exact_method_where_there_is_one():
    problem = Knapsack(40, 800)
    problem.solve = lambda: (1,) + (0,) * 39
    answer = search_choices(problem, "auto", budget=50)
    assert answer.assignment[0] == 1 and answer.evaluations == 2


@pytest.mark.parametrize(
    "settings, why",
    [
        ({"searcher": "tabu"}, "--search is one of auto"),
        ({"searcher": "anneal", "storage": "x"}, "--storage keeps the studies of tpe"),
        ({"searcher": "tpe", "policy": "x"}, "--policy is read by --search rl"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, why):
    with pytest.raises(PlanError, match=why):
        search_choices(Knapsack(4, 50), **settings)


def test_the_command_line_offers_the_searchers():
    assert options.SEARCHERS == SEARCHERS


def test_a_study_is_kept_where_a_file_can_be_made(tmp_path):
    check_storage(None)
    check_storage(str(tmp_path / "study.log"))
    check_storage(f"sqlite:///{tmp_path / 'study.db'}")
    for storage, said in (
        (str(tmp_path / "no" / "study.log"), "there is no folder"),
        (f"sqlite:///{tmp_path}/no/study.db", "there is no folder"),
        ("mysql://host/db", "give a file, or a database as sqlite"),
        (str(tmp_path), "that is a folder"),
    ):
        with pytest.raises(PlanError, match=said):
            check_storage(storage)
