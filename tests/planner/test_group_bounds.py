"""All groups at once against one at a time, and against every member."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import numpy as np
import pytest

from claw_plan.planner.group_bounds import GroupBounds
from claw_plan.planner.group_opener import may_be_cut_otherwise
from claw_plan.planner.memory import make_fits
from claw_plan.planner.score import Scorer
from claw_plan.planner.space import Space


def random_problem(toys, rng):
    graph = toys.graph(
        layers=rng.choice([1, 2, 5, 6, 8]),
        flops=rng.choice([10, 1000]),
        hidden=rng.choice([10, 1000]),
        width=rng.choice([8, 64]),
        tied=rng.choice([False, True]),
    )
    cluster = toys.cluster(
        nodes=rng.choice([1, 2]),
        devices=rng.choice([1, 2, 3, 4]),
        kind=rng.choice(["cuda", "cpu"]),
        memory_bytes=rng.choice([9_000, 40_000, 200_000, 1 << 40])
        + 1_800_000_000 * rng.choice([0, 1]),
    )
    return toys.problem(
        graph,
        cluster,
        global_batch=rng.choice([4, 6, 8]),
        precision=rng.choice(["float32", "bfloat16"]),
    )


def has_room(scorer, candidate):
    """Whether the candidate fits with its best cut, or with any."""
    path = scorer.bounds.stage_path(candidate)
    if scorer.memory.fits(candidate, path.cuts):
        return True
    if not may_be_cut_otherwise(candidate):
        return False
    return scorer.bounds.stage_path(candidate, make_fits(scorer.memory, candidate)) is not None


def test_all_groups_are_bound_as_one_is(toys):
    """Times equal those in Python; a group that is ruled out has no member that fits."""
    rng, ruled_out, left = random.Random(0), 0, 0
    for _ in range(12):
        problem = random_problem(toys, rng)
        scorer, space = Scorer(problem), Space(problem, {})
        bounds = GroupBounds(scorer, space)
        rows = np.arange(len(space.table))
        paths, may_fit = bounds.cut(rows)
        for row in rows:
            first = space.group(row).base
            assert bounds.even_ns[row] == scorer.bounds.even_ns(first), first
            assert paths[row] == scorer.bounds.compute_ns(first), first
            several = np.array(space.blocks_run_again(row))
            each_path, each_may_fit = bounds.cut(np.full(len(several), row), several)
            assert may_fit[row] or not each_may_fit.any(), first
            for again, path, fits in zip(several, each_path, each_may_fit, strict=True):
                group = space.group(row, again)
                assert path == scorer.bounds.compute_ns(group.base), group.base
                if fits:
                    left += 1
                    continue
                ruled_out += 1
                assert not any(has_room(scorer, each) for each in space.members(group)), group.base
    assert ruled_out > 100 and left > 100


def test_the_least_of_some_groups(toys):
    problem = toys.problem(toys.graph(layers=6), toys.cluster(nodes=2, devices=4))
    scorer, space = Scorer(problem), Space(problem, {})
    bounds = GroupBounds(scorer, space)
    chosen = space.table.pp > 1
    least, row = bounds.least(chosen)
    assert chosen[row]
    groups = [group.base for group in space.groups() if group.base.pp > 1]
    assert least == min(scorer.bounds.compute_ns(base) for base in groups)
    assert bounds.least(np.zeros(len(chosen), bool)) is None


@pytest.mark.parametrize("fix", [{"pp": 4}, {"microbatch_size": 8}])
def test_spaces_of_few_rows(toys, fix):
    problem = toys.problem(cluster=toys.cluster(devices=4))
    space = Space(problem, fix)
    assert len(GroupBounds(Scorer(problem), space).even_ns) == len(space.table)


def test_no_cut_of_a_chain_takes_less_than_the_bound_of_all_cuts(toys):
    """Every cut of seven units, each of a group's candidates that fits simulated."""
    rng, checked, raised = random.Random(2), 0, 0
    for _ in range(12):
        problem = random_problem(toys, rng)
        scorer = Scorer(problem)
        space = Space(problem, {"dp_shard": 1, "offload": "none", "recompute": "none"})
        rows = np.flatnonzero(space.table.pp > 1)
        bounds = GroupBounds(scorer, space)
        limits = np.full(len(rows), 1 << 60)
        bounds_ns = bounds.any_cut(rows, space.table.recompute_blocks[rows], limits)
        raised += int((bounds_ns > bounds.even_ns[rows]).sum())
        for row, bound in zip(rows.tolist(), bounds_ns.tolist(), strict=True):
            if rng.random() > 0.5:
                continue
            for candidate in space.members(space.group(row)):
                for cuts in every_cut(problem.graph, candidate):
                    if scorer.memory.fits(candidate, cuts):
                        assert bound <= scorer.step_time_ns(candidate, cuts), candidate
                        checked += 1
    assert checked > 300 and raised > 100


def every_cut(graph, candidate):
    edges, stages = graph.edges, candidate.pp * candidate.stages_per_rank
    for inner in combinations(edges[1:-1], stages - 1):
        yield tuple(pairwise((0, *inner, edges[-1])))


def test_the_cuts_that_may_beat_a_time_are_all_that_do(toys):
    """Their paths are those in Python; what is left out holds too much for every member."""
    rng, listed, ruled_out = random.Random(3), 0, 0
    for _ in range(8):
        problem = random_problem(toys, rng)
        scorer, space = Scorer(problem), Space(problem, {"offload": "none", "tp": 1})
        bounds, batch = GroupBounds(scorer, space), problem.training.global_batch
        for row in np.flatnonzero(space.table.pp > 1).tolist():
            again = rng.choice(list(space.blocks_run_again(row)))
            group = space.group(row, again)
            count = group.base.num_microbatches(batch)
            even = scorer.bounds.stage_path(group.base).longest_ns(count)
            limit = even + rng.randint(-even // 20, even // 5)
            found, steps = bounds.cuts_below(row, again, limit, 5000, 100_000)
            paths = {cuts: path_ns for path_ns, cuts in found}
            assert len(paths) == len(found) and steps > 0
            for cuts in every_cut(problem.graph, group.base):
                path_ns = scorer.bounds.path_of(group.base, cuts).longest_ns(count)
                if cuts in paths:
                    assert path_ns <= paths[cuts] < limit
                    listed += 1
                elif path_ns < limit and rng.random() < 0.1:
                    ruled_out += 1
                    for candidate in space.members(group):
                        slow = scorer.step_time_ns(candidate, cuts) >= limit
                        assert slow or not scorer.memory.fits(candidate, cuts), (candidate, cuts)
    assert listed > 300 and ruled_out > 10


def test_too_many_cuts_are_not_listed(toys):
    problem = toys.problem(toys.graph(layers=6), toys.cluster(devices=3))
    bounds = GroupBounds(Scorer(problem), Space(problem, {"pp": 3, "schedule": "1F1B"}))
    found, steps = bounds.cuts_below(0, 0, 1 << 60, 100, 10_000)
    assert len(found) == 10  # 6 blocks into 3 runs
    assert bounds.cuts_below(0, 0, 1 << 60, 9, 10_000)[0] is None
    assert bounds.cuts_below(0, 0, 1 << 60, 100, steps - 1)[0] is None
