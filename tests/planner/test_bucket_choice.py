"""Boundaries of a whole candidate: ready times by hand, and the simulator agrees that they pay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from claw_plan.planner.bucket_choice import (
    best_buckets,
    cost_of,
    gradients_of,
    with_planned_buckets,
)
from claw_plan.planner.bucket_plan import finish_ns
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.score import Scorer

MS = 1_000_000


@pytest.fixture
def scorer(toys):
    """Eight layers, 1 ms of backward each, over a link that takes 2.56 ms for one's gradient."""
    cluster = toys.cluster(devices=1, nodes=2, inter_bytes_per_s=1e5)
    return Scorer(toys.problem(toys.graph(layers=8), cluster, global_batch=2))


def choice_of(scorer, **knobs):
    candidate = Candidate(**knobs)
    return candidate, scorer.bounds.stage_path(candidate).cuts


def test_gradients_are_ready_when_their_units_have_run(scorer):
    """Forward: .1 + 8 + 2 ms; backward twice that, the blocks' 2 ms each, last to first."""
    found = gradients_of(scorer, choice_of(scorer, dp_replicate=2))
    forward_ns = 100_000 + 8 * MS + 2 * MS
    blocks = [forward_ns + 4 * MS + 2 * MS * (i + 1) for i in range(8)]
    assert found.ready_ns == (*blocks, blocks[-1] + 200_000)
    assert found.numels == (64,) * 8 + (64 * 8,)


def test_a_buckets_price_is_that_of_its_collective(scorer):
    cost = cost_of(scorer.problem, Candidate(dp_replicate=2))
    assert cost(np.array([64, 128])).tolist() == [5000 + 2_560_000, 5000 + 5_120_000]


def test_the_simulated_step_ends_when_the_plan_says(scorer):
    choice = choice_of(scorer, dp_replicate=2)
    sizes = best_buckets(scorer, choice)
    planned = replace(choice[0], buckets=sizes)
    gradients, cost = gradients_of(scorer, choice), cost_of(scorer.problem, choice[0])
    spans = scorer.score(planned, choice[1]).timeline.spans
    last = max(span.end_ns for span in spans if span.name == "bucket")
    assert last == finish_ns(gradients, sizes, cost)
    assert len([span for span in spans if span.name == "bucket"]) == len(sizes) > 1


def test_they_pay_where_filled_buckets_wait_for_the_end(scorer):
    choice = choice_of(scorer, dp_replicate=2)
    found = with_planned_buckets(scorer, choice, {})
    assert found.choice[0].buckets and found.choice[1] == choice[1]
    before, after = (scorer.step_time_ns(*each) for each in (choice, found.choice))
    assert after < 0.85 * before
    assert "gradients leave in" in found.sentences[0]


@pytest.mark.parametrize(
    ("knobs", "fix"),
    [
        ({"dp_replicate": 2}, {"bucket_bytes": 25_000_000}),
        ({"dp_shard": 2}, {}),
        ({"pp": 2}, {}),
        ({}, {}),
    ],
    ids=["pinned", "sharded", "pipeline", "one device"],
)
def test_nothing_changes_where_buckets_do_not_act_or_are_pinned(scorer, knobs, fix):
    choice = choice_of(scorer, **knobs)
    found = with_planned_buckets(scorer, choice, fix)
    assert found.choice == choice and not found.sentences


def test_inside_a_host_of_cpus_one_bucket_would_be_best_so_none_is_planned(toys):
    scorer = Scorer(toys.problem(cluster=toys.cluster(devices=2, kind="cpu"), global_batch=2))
    choice = choice_of(scorer, dp_replicate=2)
    assert with_planned_buckets(scorer, choice, {}).choice == choice


@pytest.mark.parametrize("rate", [1e4, 1e5, 1e6, 1e8])
@pytest.mark.parametrize("latency_ns", [0, 5000, 3 * MS])
def test_never_slower_than_filled_buckets_on_any_link(toys, rate, latency_ns):
    cluster = toys.cluster(devices=1, nodes=4, inter_bytes_per_s=rate)
    problem = toys.problem(toys.graph(layers=8), cluster, global_batch=4, latency_ns=latency_ns)
    scorer = Scorer(problem)
    choice = choice_of(scorer, dp_replicate=4)
    planned = replace(choice[0], buckets=best_buckets(scorer, choice))
    for size in (300, 1000, 2000, 25_000_000):
        filled = replace(choice[0], bucket_bytes=size)
        assert scorer.step_time_ns(planned, choice[1]) <= scorer.step_time_ns(filled, choice[1])
