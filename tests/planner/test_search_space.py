"""The search equals brute force over the whole space."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from claw_plan.planner.candidate import MESH_ORDER
from claw_plan.planner.group_opener import may_be_cut_otherwise
from claw_plan.planner.memory import make_fits
from claw_plan.planner.score import Scorer
from claw_plan.planner.search_space import search_closer, search_space
from claw_plan.planner.space import Space
from claw_plan.profiles.trainer import NEUTRAL
from claw_plan.profiles.trainers import load_trainers

FEWER = {"offload": "none", "microbatch_size": 1, "mesh_order": MESH_ORDER}
"""Pins that make a space small enough to be simulated whole."""


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
            if not may_be_cut_otherwise(candidate):
                continue
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
    space = Space(problem, FEWER)
    found = search_space(scorer, space)
    expected = brute_force(scorer, space)
    assert found.times_ns[found.ranked[0][0]] == expected[0]
    assert found.report.gap == 0.0 and found.report.optimal


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_it_does_with_the_axes_in_any_order(toys, kind):
    """On two nodes of three devices some groups of tp=2 lie on both, whatever the order."""
    cluster = toys.cluster(nodes=2, devices=3, kind=kind, inter_bytes_per_s=1e4)
    problem = toys.problem(toys.graph(layers=3, heads=2), cluster, global_batch=6)
    scorer = Scorer(problem)
    space = Space(problem, {"offload": "none", "microbatch_size": 1, "blocks_per_group": 1})
    assert space.knob_sizes()["mesh_order"] > 2
    found = search_space(scorer, space)
    assert found.times_ns[found.ranked[0][0]] == brute_force(scorer, space)[0]
    assert found.report.optimal


@pytest.mark.parametrize("memory_bytes", [8_000, 20_000, 24_000])
def test_search_equals_brute_force_where_memory_binds(toys, memory_bytes):
    cluster = toys.cluster(nodes=2, devices=2, memory_bytes=memory_bytes, kind="cpu")
    problem = toys.problem(toys.graph(layers=6, hidden=200), cluster)
    scorer = Scorer(problem)
    space = Space(problem, FEWER)
    found = search_space(scorer, space)
    expected = brute_force(scorer, space)
    assert found.report.memory_pruned > 0
    assert bool(found.ranked) == (expected is not None)
    if expected is not None:
        assert found.times_ns[found.ranked[0][0]] == expected[0]


def random_problem(toys, rng):
    """A chain of unlike length on a cluster whose memory may be short, priced by any trainer."""
    graph = toys.graph(
        layers=rng.randint(1, 7),
        flops=rng.choice([10, 1000]),
        hidden=rng.choice([10, 1000]),
        width=rng.choice([8, 64]),
        heads=rng.choice([1, 2, 4, 6]),
        tied=rng.random() < 0.5,
    )
    cluster = toys.cluster(
        nodes=rng.randint(1, 2),
        devices=rng.randint(1, 3),
        kind="cpu",
        memory_bytes=rng.choice([10_000, 50_000, 200_000, 1 << 40]),
        inter_bytes_per_s=rng.choice([1e3, 1e5, 1e7]),
    )
    problem = toys.problem(
        graph,
        cluster,
        global_batch=rng.randint(2, 6),
        precision=rng.choice(["float32", "bfloat16"]),
    )
    return replace(problem, trainer=rng.choice([NEUTRAL, load_trainers()["torch"]]))


def answer(problem):
    scorer, space = Scorer(problem), Space(problem, FEWER)
    found = search_space(scorer, space)
    return found, found.times_ns[found.ranked[0][0]] if found.ranked else None


@pytest.mark.slow
def test_search_equals_brute_force_on_random_problems(toys):
    """bench/search.py does the same with real models and costs."""
    rng, infeasible = random.Random(3), 0
    for _ in range(40):
        problem = random_problem(toys, rng)
        expected = brute_force(Scorer(problem), Space(problem, FEWER))
        found, time_ns = answer(problem)
        assert time_ns == (expected[0] if expected else None)
        infeasible += expected is None
        report = found.report
        counted = report.bound_pruned + report.memory_pruned + report.simulated
        assert (
            report.space == counted == sum(1 for _ in every_choice(Scorer(problem), found.space))
        )
        again, _ = answer(problem)
        assert [*again.ranked, again.looked_at] == [*found.ranked, found.looked_at]
    assert 0 < infeasible < 40


@pytest.mark.slow
def test_search_equals_brute_force_with_codecs(toys):
    """Wherever gradients are averaged: in stages, in shards, in replicas of them and beside tp."""
    rng, won = random.Random(11), set()
    pins = FEWER | {"recompute": "none", "blocks_per_group": 1, "sequence_parallel": False}
    for _ in range(30):
        problem = random_problem(toys, rng)
        codecs = rng.sample(["fp16", "fp8", "int8", "int4", "one_bit"], 2)
        scorer, space = Scorer(problem), Space(problem, pins, codecs)
        expected, found = brute_force(scorer, space), search_space(scorer, space)
        time_ns = found.times_ns[found.ranked[0][0]] if found.ranked else None
        assert time_ns == (expected[0] if expected else None)
        assert found.report.space == sum(1 for _ in every_choice(scorer, space))
        won |= {c.codec != "none" and (c.dp_shard > 1 or c.pp > 1) for c, _ in found.ranked[:1]}
    assert True in won


def test_what_is_known_is_never_answered_with_worse(toys):
    """Even when there is no time to open anything."""
    problem = toys.problem(toys.graph(layers=5), toys.cluster(nodes=2))
    scorer, space = Scorer(problem), Space(problem, {})
    choice = next((c, path.cuts) for c, path in every_choice(scorer, space) if c.num_devices == 1)
    found = search_space(scorer, space, known=[choice], time_limit_s=-1.0)
    assert found.ranked == (choice,) and not found.report.optimal
    assert found.times_ns[choice[0]] == scorer.step_time_ns(*choice)
    best = search_space(scorer, space)
    proven = search_space(scorer, space, known=[choice])
    assert proven.report.optimal and proven.ranked[0] == best.ranked[0]


def test_what_came_close_is_told(toys):
    problem = toys.problem(toys.graph(layers=5), toys.cluster(nodes=2, devices=4))
    scorer = Scorer(problem)
    found = search_space(scorer, Space(problem, {}))
    assert found.looked_at == sorted(found.looked_at)
    for bound, (candidate, cuts) in found.looked_at:
        assert found.times_ns[found.ranked[0][0]] <= scorer.step_time_ns(candidate, cuts)
        assert bound <= scorer.step_time_ns(candidate, cuts)


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


def test_a_time_limit_leaves_the_gap_that_it_prints(toys):
    """No time at all: the known candidate is the answer, and the best is within the gap."""
    problem = toys.problem(toys.graph(layers=5), toys.cluster(nodes=2, devices=2))
    scorer, space = Scorer(problem), Space(problem, FEWER)
    known = next(
        (candidate, path.cuts)
        for candidate, path in every_choice(scorer, space)
        if scorer.memory.fits(candidate, path.cuts)
    )
    cut = search_space(scorer, space, known=[known], time_limit_s=-1.0)
    whole = search_space(scorer, space)
    assert cut.ranked == (known,) and not cut.report.optimal
    best_ns, known_ns = whole.times_ns[whole.ranked[0][0]], cut.times_ns[known[0]]
    assert known_ns * (1 - cut.report.gap) <= best_ns < known_ns
    report = cut.report
    assert 0 < report.left == report.space - report.bound_pruned - 1


def test_where_finer_knobs_are_left_out_the_best_plan_s_degrees_have_them(toys, monkeypatch):
    problem = toys.problem(toys.graph(layers=4), toys.cluster(nodes=2), precision="bfloat16")
    scorer, fix = Scorer(problem), {**FEWER, "dp_replicate": 1, "zero": 3, "recompute": "full"}
    whole = search_space(scorer, Space(problem, fix))
    assert search_closer(scorer, whole, fix) is whole
    plain = {"recompute_blocks": 0, "reshard_ranks": 0, "blocks_per_group": 1}
    groups = len(Space(problem, fix | plain).table)
    monkeypatch.setattr("claw_plan.planner.space.MOST_REFINED", groups - 1)
    coarse = search_space(scorer, Space(problem, fix))
    found = search_closer(scorer, coarse, fix)
    best = found.ranked[0][0]
    own = {"pp": best.pp, "tp": best.tp}
    expected = brute_force(scorer, Space(problem, {**fix, **own}))
    assert found.times_ns[best] == expected[0] < coarse.times_ns[coarse.ranked[0][0]]
    assert found.closer.space == sum(
        1 for _ in every_choice(scorer, Space(problem, {**fix, **own}))
    )
    assert (found.space, found.report) == (coarse.space, coarse.report)
