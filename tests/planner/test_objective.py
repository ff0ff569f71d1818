"""Values of candidates, and that the search finds and proves the least of them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.planner.candidate import MESH_ORDER, Candidate
from claw_plan.planner.errors import InfeasiblePlan, PlanError
from claw_plan.planner.goodput import Failures
from claw_plan.planner.objective import (
    SCALE,
    Balanced,
    Cost,
    Deadline,
    Goodput,
    StepTime,
    check_met,
    imbalance,
    objective_of,
)
from claw_plan.planner.score import Scorer
from claw_plan.planner.search_space import search_space
from claw_plan.planner.space import Space

FEWER = {"stages_per_rank": 1, "recompute": "none", "mesh_order": MESH_ORDER}

OBJECTIVES = (
    StepTime(),
    Cost(devices_per_node=4),
    Deadline(limit_ns=50_000_000, most_devices=8),
    Goodput(failures=Failures(node_mtbf_ns=10**15, state_bytes=10**12), devices_per_node=4),
)


@pytest.fixture(scope="module")
def problem(toys):
    cluster = toys.cluster(nodes=2, devices=4, inter_bytes_per_s=2e4)
    return toys.problem(toys.graph(layers=4), cluster, global_batch=8)


@pytest.fixture(scope="module")
def everyone(problem):
    """Every candidate of the space that fits, with its cuts and time."""
    scorer, found = Scorer(problem), []
    space = Space(problem, FEWER)
    for group in space.groups():
        for candidate in space.members(group):
            cuts = scorer.bounds.stage_path(candidate).cuts
            if scorer.memory.fits(candidate, cuts):
                found.append((candidate, cuts, scorer.step_time_ns(candidate, cuts)))
    return found


def searched(problem, objective):
    scorer = Scorer(problem)
    space = Space(problem, FEWER)
    return search_space(scorer, space, objective=objective)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: o.name)
def test_the_search_finds_the_least_value_of_all(problem, everyone, objective):
    found = searched(problem, objective)
    candidate, cuts = found.ranked[0]
    best = objective.value(candidate, cuts, found.times_ns[candidate])
    assert best == min(objective.value(*each) for each in everyone)
    assert found.report.optimal
    assert found.report.simulated < len(everyone)


def test_the_balanced_search_too(problem, everyone):
    scorer = Scorer(problem)
    objective = objective_of("balanced", scorer, Space(problem, {}), None)
    found = searched(problem, objective)
    candidate, cuts = found.ranked[0]
    best = objective.value(candidate, cuts, found.times_ns[candidate])
    assert best == min(objective.value(*each) for each in everyone)


def test_weights_of_time_alone_are_the_step_time(problem):
    scorer = Scorer(problem)
    objective = objective_of("balanced=0:1", scorer, Space(problem, {}), None)
    fastest = searched(problem, StepTime())
    found = searched(problem, objective)
    assert found.times_ns[found.ranked[0][0]] == fastest.times_ns[fastest.ranked[0][0]]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: o.name)
@given(time=st.integers(1, 10**12), more=st.integers(0, 10**12), devices=st.integers(1, 8))
def test_more_time_is_never_a_lesser_value(objective, time, more, devices):
    assert objective.bound(time, devices) <= objective.bound(time + more, devices)


def test_values_by_hand():
    assert Cost(devices_per_node=4).bound(10, 5) == 20
    deadline = Deadline(limit_ns=100, most_devices=8)
    times = [(100, 1), (1, 2), (100, 2), (50, 8), (101, 1), (102, 1)]
    values = [deadline.bound(*each) for each in times]
    assert values == sorted(values)


def test_imbalance_of_three_stages_by_hand(problem):
    """Stages of 2, 3 and 4: 4 / 3 - 1; and it does not hang on the unit."""
    assert imbalance([2, 3, 4]) == pytest.approx(1 / 3)
    assert imbalance([2000, 3000, 4000]) == imbalance([2, 3, 4])
    assert imbalance([7, 7]) == 0 == imbalance([0, 0])
    objective = Balanced(scorer=Scorer(problem), least_ns=100)
    even, skewed = ((0, 3), (3, 6)), ((0, 2), (2, 6))
    own = objective.stage_times(Candidate(pp=2), skewed)
    worth = 0.3 * 1.5 + 0.7 * imbalance(own)
    assert objective.value(Candidate(pp=2), skewed, 150) == pytest.approx(SCALE * worth)
    assert imbalance(objective.stage_times(Candidate(pp=2), even)) < imbalance(own)


@pytest.mark.parametrize(
    "text, said",
    [
        ("fast", "one of step_time, cost"),
        ("deadline", "one of step_time"),
        ("deadline=3 d", "needs --steps"),
        ("goodput", "node_mtbf"),
        ("balanced=1", "takes two weights"),
        ("balanced=1:0", "takes two weights"),
    ],
)
def test_what_is_missing_is_said(problem, text, said):
    with pytest.raises(PlanError, match=said):
        objective_of(text, Scorer(problem), Space(problem, {}), None)


def test_a_deadline_that_nothing_meets():
    deadline = Deadline(limit_ns=10, most_devices=8)
    check_met(deadline, Candidate(), 10)
    with pytest.raises(InfeasiblePlan, match=r"a step may take 10 ns, the fastest .* takes 11 ns"):
        check_met(deadline, Candidate(), 11)


def test_a_cost_needs_a_price(problem):
    space = Space(problem, FEWER)
    with pytest.raises(PlanError, match="--objective cost needs a price: put"):
        objective_of("cost", Scorer(problem), space, None)
    priced = replace(problem, cluster=replace(problem.cluster, price_per_node_hour_usd=30.0))
    assert objective_of("cost", Scorer(priced), space, None).name == "cost"


def test_with_codecs_a_step_counts_as_often_as_its_codec_needs_it(problem, monkeypatch):
    monkeypatch.setattr(
        "claw_plan.planner.objective.describe_codec",
        lambda text: SimpleNamespace(step_penalty={"none": 1.0, "int8": 1.25}[text]),
    )
    objective = objective_of("step_time", Scorer(problem), Space(problem, FEWER, ["int8"]), None)
    assert objective.value(Candidate(codec="int8"), (), 1000) == 1250
    assert objective.value(Candidate(), (), 1000) == objective.bound(1000, 1) == 1000
