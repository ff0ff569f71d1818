"""No bound exceeds its simulation."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.memory_states import COPIED, WHOLE, kind_of
from claw_plan.planner.placement import group_nodes
from claw_plan.planner.score import Scorer
from claw_plan.planner.space import Space
from claw_plan.planner.supported import OF_MOMENTUM, nodes_refusal, refusal
from claw_plan.profiles.codecs import LOW_RANK
from claw_plan.profiles.coded_means import ACTING
from claw_plan.profiles.trainer import NEUTRAL
from claw_plan.profiles.trainers import load_trainers


def some_choices(scorer, space, rng):
    """A tenth of the space, and of their knobs some values that only --fix offers."""
    for group in space.groups():
        for candidate in space.members(group):
            if rng.random() > 0.1:
                continue
            path = scorer.bounds.stage_path(candidate)
            if path is not None:
                yield candidate, path
            for other in (
                replace(candidate, reshard_ranks=rng.randint(2, 4), blocks_per_group=3),
                replace(
                    candidate,
                    bucket_bytes=rng.choice([100, 1000]),
                    codec=rng.choice(["one_bit", "int8", "top_k:0.1", "low_rank:2", "zero_one:4"]),
                    collective=rng.choice(["auto", *ACTING]),
                ),
                replace(
                    candidate,
                    bucket_bytes=rng.choice([100, 1000]),
                    codec=rng.choice(["fp16", "fp8", "int8", "int4"]),
                    collective="auto",
                    offload="none",
                    blocks_per_group=rng.choice([1, candidate.blocks_per_group]),
                ),
            ):
                if path is not None and not refusal(other) and acts(scorer.problem, other):
                    yield other, path


def acts(problem, candidate):
    """Momentum and factors do where whole replicas meet during backward; none at Megatron's."""
    meets = candidate.reduces_in_backward and kind_of(problem, candidate) == WHOLE
    nodes = group_nodes(candidate, "dp_replicate", problem.devices_per_node)
    if nodes_refusal(candidate, nodes):
        return False
    if candidate.codec.partition(":")[0] in (*OF_MOMENTUM, LOW_RANK):
        return meets
    return candidate.codec == "none" or kind_of(problem, candidate) != COPIED


def random_problem(toys, rng):
    graph = toys.graph(
        layers=rng.choice([1, 3, 6]),
        flops=rng.choice([10, 1000]),
        hidden=rng.choice([10, 1000]),
        width=rng.choice([8, 64]),
    )
    cluster = toys.cluster(
        nodes=rng.choice([1, 2, 3]),
        devices=rng.choice([1, 2, 4]),
        kind=rng.choice(["cuda", "cpu"]),
        intra_bytes_per_s=rng.choice([1e5, 1e7, 333_333_333.0]),
        inter_bytes_per_s=rng.choice([1e4, 1e6]),
    )
    problem = toys.problem(
        graph,
        cluster,
        global_batch=rng.choice([6, 8, 12]),
        precision=rng.choice(["float32", "bfloat16"]),
    )
    trainers = load_trainers()
    trainer = rng.choice([NEUTRAL, trainers["torch"], trainers["megatron-core"]])
    return replace(problem, trainer=trainer)


@pytest.mark.slow
def test_no_bound_exceeds_its_simulation(toys):
    """Random problems, a tenth of the candidates of each: more than 10,000 bounds in all."""
    rng, checked = random.Random(0), 0
    while checked < 10_000:
        scorer = Scorer(random_problem(toys, rng))
        bounds = scorer.bounds
        for candidate, path in some_choices(scorer, Space(scorer.problem, {}), rng):
            simulated = scorer.step_time_ns(candidate, path.cuts)
            alone, streams = (
                bounds.schedule_ns(candidate, path),
                bounds.streams_ns(candidate, path),
            )
            whole = bounds.candidate_ns(candidate, path)
            assert alone <= streams <= simulated, candidate
            assert bounds.work_ns(candidate, path) <= simulated, candidate
            assert max(alone, whole) <= simulated, candidate
            crude, path_bound = bounds.even_ns(candidate), bounds.compute_ns(candidate)
            assert crude <= path_bound <= simulated, candidate
            checked += 1


def test_the_path_bound_is_exact_without_data_parallelism(toys):
    """One device, and a pipeline whose messages cost nothing: nothing else can take time."""
    graph = toys.graph(layers=8, hidden=0, tied=False, ends=False)
    problem = toys.problem(graph, toys.cluster(devices=4), latency_ns=0)
    scorer = Scorer(problem)
    for candidate in (Candidate(), Candidate(pp=4), Candidate(pp=2, schedule="GPipe")):
        path = scorer.bounds.stage_path(candidate)
        simulated = scorer.step_time_ns(candidate, path.cuts)
        bounds = scorer.bounds
        least = min(bounds.candidate_ns(candidate, path), bounds.compute_ns(candidate))
        # All but the optimizer: 28 bytes for each of the table's and the blocks' elements.
        # And the loss, for which all ranks meet: 8 bytes at 1e6 bytes/s.
        assert 0 <= simulated - least <= 28 * (64 * 8 + 8 * 64) // 10 + 8_000
