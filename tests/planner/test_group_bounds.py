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
    """Every cut of seven units into two and three stages, 1F1B, without what messages cost."""
    problem = toys.problem(toys.graph(layers=5), toys.cluster(devices=3), global_batch=6)
    scorer, fix = Scorer(problem), {"schedule": "1F1B", "dp_shard": 1, "dp_replicate": 1, "tp": 1}
    space = Space(problem, fix)
    bounds_ns = GroupBounds(scorer, space).any_cut_ns
    checked = 0
    for row, bound in enumerate(bounds_ns.tolist()):
        base = space.group(row).base
        if base.pp == 1 or base.recompute_blocks:
            continue
        path = scorer.bounds.stage_path(base)
        assert bound <= path.longest_ns(base.num_microbatches(6))
        for inner in combinations(range(2, 6), base.pp - 1):
            cuts = tuple(pairwise((0, *inner, 7)))
            assert bound <= scorer.step_time_ns(base, cuts)
            checked += 1
    assert checked > 50
