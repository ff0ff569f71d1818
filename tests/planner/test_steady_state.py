"""Steps of an asynchronous pipeline against closed forms on the toy model of `test_lower`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.score import Scorer
from claw_plan.planner.steady_state import steady_step

MS = 1_000_000
SCHEDULE = "PipeDream2BW"


def steady(problem, candidate):
    scorer = Scorer(problem)
    cuts = scorer.bounds.stage_path(candidate).cuts
    held = [scorer.memory.held(candidate, *cut) for cut in cuts]
    return scorer, cuts, steady_step(problem, scorer.shards, candidate, cuts, held)


def update_ns(elements):
    """28 bytes an element for AdamW and 8 for keeping a version, at the toy's 10 bytes/ns."""
    return 28 * elements // 10 + 8 * elements // 10


@pytest.mark.parametrize("stages, microbatches", [(2, 2), (2, 5), (3, 3), (4, 8), (8, 8)])
def test_equal_stages_have_no_bubble(toys, stages, microbatches):
    """m (F + B) and the largest update; fill and drain take (p - 1) (F + B) once a run."""
    graph = toys.graph(layers=2 * stages, hidden=0, tied=False, ends=False)
    cluster = toys.cluster(devices=stages)
    problem = toys.problem(graph, cluster, global_batch=microbatches, latency_ns=0)
    candidate = Candidate(pp=stages, schedule=SCHEDULE)
    scorer, cuts, step = steady(problem, candidate)
    forward_and_backward = 2 * 3 * MS
    first_stage = update_ns(64 * 8 + 2 * 8 * 8)
    assert step.period_ns == microbatches * forward_and_backward + first_stage
    fill_and_drain = (stages - 1) * forward_and_backward
    # Other stages change fewer weights, and the last step's updates wait for nobody.
    assert 0 <= fill_and_drain - step.fill_and_drain_ns <= 4 * first_stage
    assert scorer.step_time_ns(candidate, cuts) == step.period_ns
