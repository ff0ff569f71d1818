"""Plain FSDP and DDP are known before the search, and no answer is slower."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.cut_search import search_beyond
from claw_plan.planner.plain_baselines import agrees, plain_baselines
from claw_plan.planner.score import Scorer
from claw_plan.planner.search_space import search_space
from claw_plan.planner.space import Space
from claw_plan.profiles.trainer import NEUTRAL
from claw_plan.profiles.trainers import load_trainers


def test_plain_means_all_devices_and_nothing_else(toys):
    problem = toys.problem(toys.graph(layers=4), toys.cluster(devices=4), global_batch=8)
    plain = plain_baselines(Scorer(problem), {"tp": 2, "microbatch_size": 2})
    fsdp, ddp = (plain[name][0] for name in ("FSDP", "DDP"))
    assert (fsdp.dp_shard, fsdp.dp_replicate, fsdp.tp) == (4, 1, 1)
    assert (ddp.dp_shard, ddp.dp_replicate, ddp.tp) == (1, 4, 1)
    assert fsdp.microbatch_size == ddp.microbatch_size == 2
    assert ddp.bucket_bytes == Candidate().bucket_bytes


def test_a_batch_that_does_not_divide_is_told(toys):
    problem = toys.problem(toys.graph(layers=4), toys.cluster(devices=3), global_batch=4)
    plain = plain_baselines(Scorer(problem), {})
    assert all(isinstance(why, str) and "4" in why for why in plain.values())
    assert not any(agrees(choice, {}) for choice in plain.values())


@pytest.mark.parametrize(("fix", "known"), [({}, 2), ({"dp_shard": 4}, 1), ({"pp": 2}, 0)])
def test_baselines_agree_with_pins_or_not(toys, fix, known):
    problem = toys.problem(toys.graph(layers=4), toys.cluster(devices=4), global_batch=8)
    plain = plain_baselines(Scorer(problem), {})
    assert sum(agrees(choice, fix) for choice in plain.values()) == known


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_no_answer_is_slower_than_plain(toys, seed):
    """Also where a limit ends the search before it looked at anything."""
    rng = random.Random(seed)
    graph = toys.graph(
        layers=rng.randint(2, 6), flops=rng.choice([10, 1000]), width=rng.choice([8, 64])
    )
    cluster = toys.cluster(
        nodes=rng.randint(1, 2),
        devices=rng.choice([2, 4]),
        kind=rng.choice(["cpu", "cuda"]),
        inter_bytes_per_s=rng.choice([1e4, 1e6]),
    )
    precision = rng.choice(["float32", "bfloat16"])
    problem = toys.problem(graph, cluster, global_batch=8, precision=precision)
    problem = replace(problem, trainer=rng.choice([NEUTRAL, load_trainers()["torch"]]))
    scorer = Scorer(problem)
    plain = [c for c in plain_baselines(scorer, {}).values() if agrees(c, {})]
    least_ns = min(scorer.step_time_ns(*choice) for choice in plain)
    for most_opened in (None, 0):
        found = search_space(scorer, Space(problem, {}), known=plain, most_opened=most_opened)
        found = search_beyond(scorer, found, {})
        assert scorer.step_time_ns(*found.ranked[0]) <= least_ns
