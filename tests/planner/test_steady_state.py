"""Steps of an asynchronous pipeline against closed forms on the toy model of `test_lower`."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
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


@settings(deadline=None, max_examples=25)
@given(
    stages=st.integers(2, 4),
    more=st.integers(0, 4),
    layers=st.integers(4, 9),
    recompute=st.sampled_from(["none", "full"]),
    latency_ns=st.sampled_from([0, 5000]),
)
def test_a_period_lies_between_its_bound_and_the_step_with_a_flush(
    toys, stages, more, layers, recompute, latency_ns
):
    graph = toys.graph(layers=layers, hidden=100, ends=True)
    cluster = toys.cluster(devices=stages)
    batch = stages + more
    problem = toys.problem(graph, cluster, global_batch=batch, latency_ns=latency_ns)
    candidate = Candidate(pp=stages, schedule=SCHEDULE, recompute=recompute)
    scorer, cuts, step = steady(problem, candidate)
    path = scorer.bounds.path_of(candidate, cuts)
    assert scorer.bounds.overlapping_ns(candidate, path) <= step.period_ns
    flushed = Candidate(pp=stages, recompute=recompute)
    kept_ns = 8 * sum(p.trainable * 64 * 8 for p in graph.parameters)
    assert step.period_ns <= scorer.step_time_ns(flushed, cuts) + kept_ns
    assert step.timeline.step_time_ns == step.period_ns
    scored = scorer.score(candidate, cuts)
    assert sum(scored.parts_ns.values()) == scored.step_time_ns == step.period_ns
    assert scored.fill_and_drain_ns == step.fill_and_drain_ns >= 0


def test_memory_is_a_second_version_beside_what_1f1b_keeps(toys):
    """Four bytes an element more; activations of as many microbatches in flight."""
    graph = toys.graph(layers=8, hidden=0, tied=False, ends=False)
    problem = toys.problem(graph, toys.cluster(devices=4), global_batch=8)
    scorer = Scorer(problem)
    overlapping, flushed = (
        scorer.memory.stages(candidate, scorer.bounds.stage_path(candidate).cuts)
        for candidate in (Candidate(pp=4, schedule=SCHEDULE), Candidate(pp=4))
    )
    for own, other in zip(overlapping, flushed, strict=True):
        assert own.parts["versions"] == own.parts["parameters"]
        assert own.peak_bytes - own.parts["versions"] == other.peak_bytes
        assert "waiting gradients" not in own.parts


def test_tied_ends_keep_a_steps_gradients_until_all_stages_have_theirs(toys):
    graph = toys.graph(layers=8, hidden=0, tied=True)
    problem = toys.problem(graph, toys.cluster(devices=4), global_batch=8)
    scorer, candidate = Scorer(problem), Candidate(pp=4, schedule=SCHEDULE)
    stages = scorer.memory.stages(candidate, scorer.bounds.stage_path(candidate).cuts)
    assert ["waiting gradients" in stage.parts for stage in stages] == [True, False, False, True]
    assert stages[0].parts["waiting gradients"] == stages[0].parts["parameters"]
