"""Boundaries of a whole candidate: ready times by hand, and the simulator agrees that they pay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from claw_plan.planner.bucket_choice import (
    cost_of,
    runs_of_gradients,
    with_planned_buckets,
)
from claw_plan.planner.bucket_order import ordered_buckets
from claw_plan.planner.bucket_plan import finish_ns, plan_buckets
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


def planned_for(scorer, choice):
    runs = runs_of_gradients(scorer, choice)
    return runs.counts(plan_buckets(runs.gradients, cost_of(scorer.problem, choice[0])).sizes)


def test_gradients_are_ready_when_their_units_have_run(scorer):
    """From the last backward on: the head's 4 ms, the blocks' 2 ms each, last to first.

    The table comes with the prologue's 200 us.
    """
    runs = runs_of_gradients(scorer, choice_of(scorer, dp_replicate=2))
    blocks = [4 * MS + 2 * MS * (i + 1) for i in range(8)]
    assert runs.gradients.ready_ns == (*blocks, blocks[-1] + 200_000)
    assert runs.gradients.numels == (64,) * 8 + (64 * 8,)
    assert runs.numbers == (1,) * 9


def test_parameters_are_needed_where_their_units_begin(scorer):
    """Prologue .1 ms, blocks 1 ms, head 2 ms; the loss travels before, 8 bytes in 80 + 5 us."""
    following = runs_of_gradients(scorer, choice_of(scorer, dp_replicate=2)).following
    loss_ns = 5_000 + 8 * 10_000 * 2
    blocks = [loss_ns + 100_000 + MS * i for i in reversed(range(8))]
    assert following.needed_ns == (*blocks, loss_ns)
    assert following.forward_ns == loss_ns + 100_000 + 8 * MS + 2 * MS


def test_recorded_times_cut_inside_a_block(toys):
    """Two tensors in each block, the first ready after a quarter of its backward."""
    graph = toys.graph(layers=4)
    twins = [replace(p, names=(f"{p.name}.twin",)) for p in graph.parameters[1:]]
    pairs = [one for pair in zip(graph.parameters[1:], twins, strict=True) for one in pair]
    shares = {p.name: 1.0 for p in graph.parameters} | {p.name: 0.25 for p in twins}
    graph = replace(graph, parameters=(graph.parameters[0], *pairs), ready_shares=shares)
    cluster = toys.cluster(devices=1, nodes=2, inter_bytes_per_s=5e5)
    scorer = Scorer(toys.problem(graph, cluster, global_batch=2))
    choice = choice_of(scorer, dp_replicate=2)
    runs = runs_of_gradients(scorer, choice)
    assert runs.gradients.ready_ns[:3] == (4 * MS + MS // 2, 6 * MS, 6 * MS + MS // 2)
    sizes = planned_for(scorer, choice)
    assert any(size % 2 for size in sizes[:-1])
    cost = cost_of(scorer.problem, choice[0])
    spans = scorer.score(replace(choice[0], buckets=sizes), choice[1]).timeline.spans
    begins = min(span.start_ns for span in spans if span.kind == "backward")
    last = max(span.end_ns for span in spans if span.name == "bucket")
    assert last - begins == finish_ns(runs.gradients, sizes, cost)


def test_a_buckets_price_is_that_of_its_collective(scorer):
    cost = cost_of(scorer.problem, Candidate(dp_replicate=2))
    assert cost(np.array([64, 128])).tolist() == [5000 + 2_560_000, 5000 + 5_120_000]


def test_the_simulated_step_ends_when_the_plan_says(scorer):
    choice = choice_of(scorer, dp_replicate=2)
    sizes = planned_for(scorer, choice)
    planned = replace(choice[0], buckets=sizes)
    gradients = runs_of_gradients(scorer, choice).gradients
    cost = cost_of(scorer.problem, choice[0])
    spans = scorer.score(planned, choice[1]).timeline.spans
    begins = min(span.start_ns for span in spans if span.kind == "backward")
    last = max(span.end_ns for span in spans if span.name == "bucket")
    assert last - begins == finish_ns(gradients, sizes, cost)
    assert len([span for span in spans if span.name == "bucket"]) == len(sizes) > 1


def test_they_pay_where_filled_buckets_wait_for_the_end(scorer):
    choice = choice_of(scorer, dp_replicate=2)
    found = with_planned_buckets(scorer, choice, {}, own_optimizer=True)
    assert found.choice[0].buckets and found.choice[1] == choice[1]
    assert not found.choice[0].bucket_order
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
    planned = replace(choice[0], buckets=planned_for(scorer, choice))
    for size in (300, 1000, 2000, 25_000_000):
        filled = replace(choice[0], bucket_bytes=size)
        assert scorer.step_time_ns(planned, choice[1]) <= scorer.step_time_ns(filled, choice[1])


def test_an_order_is_offered_where_the_next_forward_need_not_wait_for_all(scorer):
    choice = choice_of(scorer, dp_replicate=2)
    waiting = with_planned_buckets(scorer, choice, {}, own_optimizer=True).choice
    found = with_planned_buckets(scorer, choice, {})
    candidate = found.choice[0]
    assert sorted(candidate.bucket_order) == [*range(len(candidate.buckets))]
    assert sum(candidate.buckets) == 9
    assert scorer.step_time_ns(*found.choice) < 0.99 * scorer.step_time_ns(*waiting)
    assert "the next forward waits for each of" in found.sentences[0]


def test_the_simulated_steps_repeat_after_as_long_as_the_order_was_found_to_take(scorer):
    choice = choice_of(scorer, dp_replicate=2)
    runs = runs_of_gradients(scorer, choice)
    found = ordered_buckets(runs.gradients, runs.following, cost_of(scorer.problem, choice[0]))
    ordered = replace(choice[0], buckets=runs.counts(found.sizes), bucket_order=found.order)
    step_ns = scorer.step_time_ns(ordered, choice[1])
    # The optimizer is called once a bucket in the simulated step; rounding of its shares.
    calls_ns = 60_000 * len(found.sizes)
    assert abs(step_ns - found.finish_ns) <= calls_ns


@pytest.mark.parametrize(
    ("changed", "knobs"),
    [
        ({"clip_norm": 1.0}, {}),
        ({"may_miss": True}, {}),
        ({}, {"codec": "int8"}),
        ({}, {"collective": "ring"}),
        ({}, {"tp": 2}),
    ],
    ids=["clipping", "missed parameters", "codec", "algorithm", "tensor parallel"],
)
def test_no_order_where_a_run_would_wait_for_all(toys, changed, knobs):
    cluster = toys.cluster(devices=2 if knobs.get("tp") else 1, nodes=2, inter_bytes_per_s=1e5)
    graph = replace(toys.graph(layers=8), may_miss=changed.get("may_miss", False))
    problem = toys.problem(graph, cluster, global_batch=2)
    training = replace(problem.training, clip_norm=changed.get("clip_norm"))
    scorer = Scorer(replace(problem, training=training))
    found = with_planned_buckets(scorer, choice_of(scorer, dp_replicate=2, **knobs), {})
    assert not found.choice[0].bucket_order
