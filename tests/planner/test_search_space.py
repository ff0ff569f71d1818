"""The search equals brute force over the whole space."""

from __future__ import annotations

import pytest

from claw_plan.planner.memory import make_fits
from claw_plan.planner.score import Scorer
from claw_plan.planner.search_space import search_space
from claw_plan.planner.space import Space


def every_choice(scorer, space):
    for group in space.groups():
        for candidate in space.members(group):
            path = scorer.bounds.stage_path(candidate)
            if path is not None:
                yield candidate, path


def brute_force(scorer, space):
    """(time, candidate) of the best that fits, every candidate simulated."""
    best = None
    for candidate, path in every_choice(scorer, space):
        cuts = path.cuts
        if not all(stage.fits for stage in scorer.memory.stages(candidate, cuts)):
            if candidate.pp == 1 or candidate.stages_per_rank > 1:
                continue  # stages of a rank that holds several are only cut evenly
            path = scorer.bounds.stage_path(candidate, make_fits(scorer.memory, candidate))
            if path is None:
                continue
            cuts = path.cuts
        time_ns = scorer.step_time_ns(candidate, cuts)
        if best is None or time_ns < best[0]:
            best = (time_ns, candidate)
    return best


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("nodes, devices", [(1, 1), (1, 4), (2, 2), (2, 4)])
@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_search_equals_brute_force(toys, nodes, devices, precision, kind):
    cluster = toys.cluster(nodes=nodes, devices=devices, kind=kind)
    problem = toys.problem(toys.graph(layers=5), cluster, precision=precision)
    scorer = Scorer(problem)
    found = search_space(scorer, Space(problem, {}))
    expected = brute_force(scorer, Space(problem, {}))
    assert found.times_ns[found.ranked[0][0]] == expected[0]
    assert found.report.gap == 0.0 and found.report.optimal


@pytest.mark.parametrize("memory_bytes", [8_000, 20_000, 30_000])
def test_search_equals_brute_force_where_memory_binds(toys, memory_bytes):
    cluster = toys.cluster(nodes=2, devices=2, memory_bytes=memory_bytes, kind="cpu")
    problem = toys.problem(toys.graph(layers=6, hidden=200), cluster)
    scorer = Scorer(problem)
    found = search_space(scorer, Space(problem, {}))
    expected = brute_force(scorer, Space(problem, {}))
    assert found.report.memory_pruned > 0
    assert bool(found.ranked) == (expected is not None)
    if expected is not None:
        assert found.times_ns[found.ranked[0][0]] == expected[0]


def test_counts_add_up_to_the_space(toys):
    problem = toys.problem(toys.graph(layers=5), toys.cluster(nodes=2, devices=4))
    scorer, space = Scorer(problem), Space(problem, {})
    found = search_space(scorer, space)
    report = found.report
    assert report.space == sum(1 for _ in every_choice(scorer, space))
    assert report.bound_pruned + report.memory_pruned + report.simulated == report.space
    assert report.bound_pruned > 0


def test_a_pinned_knob_is_kept(toys):
    problem = toys.problem()
    found = search_space(Scorer(problem), Space(problem, {"pp": 2, "schedule": "GPipe"}))
    assert {(c.pp, c.schedule) for c, _ in found.ranked} == {(2, "GPipe")}
