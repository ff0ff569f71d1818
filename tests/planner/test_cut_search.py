"""Other cuts are searched exactly where they are few, and bound where they are many."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from claw_plan.planner import cut_search
from claw_plan.planner.candidate import MESH_ORDER, Candidate
from claw_plan.planner.cut_search import search_cuts
from claw_plan.planner.objective import Cost, StepTime
from claw_plan.planner.score import Scorer
from claw_plan.planner.search_space import search_space
from claw_plan.planner.space import Space
from claw_plan.profiles.trainer import NEUTRAL
from claw_plan.profiles.trainers import load_trainers

FEWER = {"offload": "none", "microbatch_size": 1, "mesh_order": MESH_ORDER, "tp": 1}
"""Pins that make a space small enough to be simulated whole, with all cuts."""


def all_cuts(graph, stages):
    for inner in combinations(graph.edges[1:-1], stages - 1):
        yield tuple(pairwise((0, *inner, graph.edges[-1])))


def brute_force(scorer, space, objective=StepTime()):  # noqa: B008 - it is frozen
    """The best of all candidates with all cuts that fit, each simulated; None where none does."""
    best = None
    for group in space.groups():
        for candidate in space.members(group):
            for cuts in all_cuts(scorer.problem.graph, candidate.pp * candidate.stages_per_rank):
                if scorer.memory.fits(candidate, cuts):
                    time_ns = scorer.step_time_ns(candidate, cuts)
                    worth = objective.value(candidate, cuts, time_ns)
                    best = worth if best is None else min(best, worth)
    return best


def random_problem(toys, rng):
    """A chain whose ends weigh as much as blocks or not, where memory may be short."""
    graph = toys.graph(
        layers=rng.randint(3, 6),
        flops=rng.choice([10, 1000]),
        hidden=rng.choice([10, 300]),
        width=rng.choice([8, 64]),
        tied=rng.random() < 0.5,
        ends=rng.random() < 0.7,
    )
    cluster = toys.cluster(
        nodes=rng.randint(1, 2),
        devices=rng.randint(2, 3),
        kind=rng.choice(["cpu", "cuda"]),
        memory_bytes=rng.choice([60_000, 200_000, 1 << 40]) + 1_800_000_000 * rng.choice([0, 1]),
        inter_bytes_per_s=rng.choice([1e4, 1e6]),
    )
    problem = toys.problem(
        graph,
        cluster,
        global_batch=rng.randint(3, 6),
        precision=rng.choice(["float32", "bfloat16"]),
    )
    return replace(problem, trainer=rng.choice([NEUTRAL, load_trainers()["torch"]]))


@pytest.mark.slow
def test_the_answer_is_the_best_of_all_cuts_on_random_problems(toys):
    rng, better, pipelined, infeasible = random.Random(5), 0, 0, 0
    for number in range(40):
        problem = random_problem(toys, rng)
        fix = FEWER | {
            "pp": min(3, problem.cluster.num_devices),
            "recompute": rng.choice(["none", "full"]),
        }
        if number % 2:
            del fix["pp"]
        scorer, space = Scorer(problem), Space(problem, fix)
        even = search_space(scorer, space)
        found = search_cuts(scorer, even)
        expected = brute_force(Scorer(problem), space)
        if expected is None:
            infeasible += 1
            assert not found.ranked
            continue
        candidate, cuts = found.ranked[0]
        assert found.times_ns[candidate] == scorer.step_time_ns(candidate, cuts) == expected
        assert found.report.cuts.gap == 0.0 and found.report.cuts.groups_left == 0
        assert search_cuts(Scorer(problem), even).ranked == found.ranked
        better += not even.ranked or expected < even.times_ns[even.ranked[0][0]]
        pipelined += candidate.pp > 1
    assert better >= 3 and pipelined >= 10 and infeasible < 20


@pytest.mark.slow
def test_other_objectives_have_other_cuts_too(toys):
    """The cheapest step: a slower one on fewer nodes may be better than the best so far."""
    rng, better = random.Random(6), 0
    for _ in range(6):
        problem = random_problem(toys, rng)
        objective = Cost(devices_per_node=problem.devices_per_node)
        scorer = Scorer(problem)
        space = Space(problem, FEWER | {"recompute": "none", "pp": 2})
        even = search_space(scorer, space, objective=objective)
        if not even.ranked:
            continue
        found = search_cuts(scorer, even, objective)
        expected = brute_force(scorer, space, objective)
        candidate, cuts = found.ranked[0]
        assert objective.value(candidate, cuts, found.times_ns[candidate]) == expected
        before = objective.value(*even.ranked[0], even.times_ns[even.ranked[0][0]])
        better += expected < before
    assert better


def test_a_light_first_stage_beats_the_even_cut(toys):
    """Of 5 blocks over 2 stages, the last of which has a head of 2: 3 + 4 or 4 + 3 as even."""
    graph = toys.graph(layers=5, hidden=0, tied=False)
    problem = toys.problem(graph, toys.cluster(devices=2), global_batch=2, latency_ns=0)
    fix = FEWER | {"pp": 2, "schedule": "1F1B", "recompute": "none"}
    scorer, space = Scorer(problem), Space(problem, fix)
    even = search_space(scorer, space)
    found = search_cuts(scorer, even)
    assert found.times_ns[found.ranked[0][0]] == brute_force(scorer, space)
    assert {candidate.pp for candidate, _ in found.ranked} == {2}
    assert len({candidate for candidate, _ in found.ranked}) == len(found.ranked)


def test_what_is_not_looked_at_is_within_the_gap(toys, monkeypatch):
    """With next to no budget the groups are left, and the best cut is no better than told."""
    graph = toys.graph(layers=6, tied=False)
    problem = toys.problem(graph, toys.cluster(devices=3), global_batch=4)
    fix = FEWER | {"pp": 3, "recompute": "none"}
    scorer, space = Scorer(problem), Space(problem, fix)
    even = search_space(scorer, space)
    monkeypatch.setattr(cut_search, "BUDGET", 0)
    found = search_cuts(scorer, even)
    report, best_ns = found.report.cuts, found.times_ns[found.ranked[0][0]]
    assert report.groups_left == report.groups > 0 and report.cuts == 0 < report.gap
    assert best_ns * (1 - report.gap) <= brute_force(scorer, space)


def test_boundaries_are_moved_where_groups_are_left(toys, monkeypatch):
    """No group is listed, so that only the best plan's neighbours are tried."""
    graph = toys.graph(layers=6, tied=False, hidden=10)
    problem = toys.problem(graph, toys.cluster(devices=3), global_batch=4)
    fix = FEWER | {"pp": 3, "recompute": "none", "schedule": "1F1B"}
    scorer, space = Scorer(problem), Space(problem, fix)
    even = search_space(scorer, space)
    whole = search_cuts(scorer, even)
    monkeypatch.setattr(cut_search, "MOST_CUTS", 0)
    found = search_cuts(scorer, even)
    assert found.report.cuts.groups_left > 0
    assert found.times_ns[found.ranked[0][0]] == whole.times_ns[whole.ranked[0][0]]


def test_without_a_proof_nothing_is_added(toys):
    problem = toys.problem(toys.graph(layers=5), toys.cluster(nodes=2))
    scorer, space = Scorer(problem), Space(problem, {})
    known = [(Candidate(), scorer.bounds.stage_path(Candidate()).cuts)]
    cut_short = search_space(scorer, space, known=known, time_limit_s=-1.0)
    assert search_cuts(scorer, cut_short) is cut_short and cut_short.report.cuts is None
