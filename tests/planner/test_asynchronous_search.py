"""Asynchronous plans: found like brute force finds them, and only where they are allowed."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from claw_plan.planner.asynchronous_search import (
    asynchronous_said,
    search_asynchronous,
    with_asynchronous,
)
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.errors import PlanError
from claw_plan.planner.members import divisors
from claw_plan.planner.schedules import ASYNCHRONOUS, PIPEDREAM_2BW
from claw_plan.planner.score import Scorer
from claw_plan.planner.search_space import search_space
from claw_plan.planner.space import Space

RECOMPUTE = ("none", "full", "half")


def every_one(scorer, devices, batch):
    """The simulated times of all plans of the kind, each with its evenest cut."""
    for pp, tp, dp in product(range(2, devices + 1), (1, 2), divisors(batch)):
        if pp * tp * dp > devices:
            continue
        for size in divisors(batch // dp):
            if batch // (dp * size) < pp:
                continue
            for again, sequence in product(RECOMPUTE, {False, tp > 1}):
                candidate = Candidate(
                    pp=pp, tp=tp, dp_replicate=dp, microbatch_size=size, recompute=again,
                    sequence_parallel=sequence, schedule=PIPEDREAM_2BW,
                )  # fmt: skip
                path = scorer.bounds.stage_path(candidate)
                if path is not None and scorer.memory.fits(candidate, path.cuts):
                    yield scorer.step_time_ns(candidate, path.cuts)


@pytest.mark.parametrize(("layers", "devices", "batch"), [(4, 4, 8), (5, 3, 6), (8, 8, 8)])
def test_the_best_is_that_of_brute_force(toys, layers, devices, batch):
    graph = toys.graph(layers=layers, hidden=100)
    problem = toys.problem(graph, toys.cluster(devices=devices), global_batch=batch)
    scorer = Scorer(problem)
    found = search_asynchronous(scorer, {})
    assert found.report.optimal
    best, _ = found.ranked[0]
    assert best.schedule == PIPEDREAM_2BW
    assert found.times_ns[best] == min(every_one(scorer, devices, batch))
    report = found.report
    assert report.space == report.bound_pruned + report.memory_pruned + report.simulated


def test_it_is_offered_only_where_it_is_allowed(toys):
    graph = toys.graph(layers=8, hidden=0, tied=False)
    problem = toys.problem(graph, toys.cluster(devices=4), global_batch=4)
    scorer = Scorer(problem)
    space = Space(problem, {"pp": 4})
    found = search_space(scorer, space)
    assert not any(choice[0].schedule in ASYNCHRONOUS for choice in found.ranked)
    assert not any(c.schedule in ASYNCHRONOUS for g in space.groups() for c in space.members(g))
    allowed = with_asynchronous(scorer, found, {"pp": 4})
    assert allowed.ranked[0][0].schedule == PIPEDREAM_2BW
    assert set(found.ranked) < set(allowed.ranked)
    times = [allowed.times_ns[choice[0]] for choice in allowed.ranked]
    assert times == sorted(times)
    refused = with_asynchronous(scorer, found, {"dp_shard": 2})
    assert refused == replace(found, said=refused.said)
    [said] = refused.said
    assert said.startswith("--asynchronous brings no plan: --fix schedule=PipeDream2BW keeps two")


def test_pinned_knobs_that_leave_no_such_plan_are_told(toys):
    problem = toys.problem(toys.graph(layers=4), toys.cluster(devices=4), global_batch=4)
    with pytest.raises(PlanError, match="keeps two versions of whole parameters"):
        search_asynchronous(Scorer(problem), {"dp_shard": 2})
    with pytest.raises(PlanError, match="use pp above 1"):
        search_asynchronous(Scorer(problem), {"pp": 1})
    training = replace(problem.training, precision="float16")
    with pytest.raises(PlanError, match="use --precision bfloat16 or float32"):
        search_asynchronous(Scorer(replace(problem, training=training)), {})


def test_a_large_bubble_is_told_with_what_it_would_take(toys):
    graph = toys.graph(layers=8, hidden=0, tied=False, ends=False)
    problem = toys.problem(graph, toys.cluster(devices=4), global_batch=4, latency_ns=0)
    scorer = Scorer(problem)
    flushed, overlapping = Candidate(pp=4), Candidate(pp=4, schedule=PIPEDREAM_2BW)
    cuts = scorer.bounds.stage_path(flushed).cuts
    # (p - 1) / (m + p - 1) = 3 / 7 of the passes are bubble.
    [sentence] = asynchronous_said(scorer, scorer.score(flushed, cuts))
    assert "would save most of the bubble of 43%" in sentence
    assert "weights one step old" in sentence and "--asynchronous" in sentence
    [sentence] = asynchronous_said(scorer, scorer.score(overlapping, cuts))
    # Fill and drain are 3 of the 4 forwards and backwards of a step.
    assert "0.75 steps more" in sentence
    single = Candidate(microbatch_size=4)
    assert not list(asynchronous_said(scorer, scorer.score(single, ((0, len(graph.units)),))))
