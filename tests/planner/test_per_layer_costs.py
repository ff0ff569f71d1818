"""Blocks that all choose alike are scored as the candidate that says the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.errors import PlanError
from claw_plan.planner.graph import Amount
from claw_plan.planner.per_layer import KEEP, LayerOption
from claw_plan.planner.per_layer_costs import layer_choices
from claw_plan.planner.score import Scorer


def score_of(choices, assignment):
    """(time, peak)"""
    scores = replace(choices, capacity_bytes=0).scores(np.array([assignment]))
    return int(scores.time_ns[0]), int(scores.excess_bytes[0])


@pytest.mark.parametrize("mode", ["none", "half", "full"])
@pytest.mark.parametrize("microbatch", [1, 2])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("slow", [1, 1000])
def test_alike_blocks_equal_the_candidate(toys, mode, microbatch, precision, kind, slow):
    cluster = toys.cluster(
        nodes=2, devices=2, kind=kind, intra_bytes_per_s=1e6 / slow, inter_bytes_per_s=1e5 / slow
    )
    problem = toys.problem(toys.graph(layers=5, tied=False), cluster, precision=precision)
    scorer = Scorer(problem)
    candidate = Candidate(dp_shard=4, microbatch_size=microbatch)
    choices = layer_choices(scorer, candidate)
    time_ns, peak_bytes = score_of(choices, choices.uniform(LayerOption(mode, "reshard")))
    alike = replace(candidate, recompute=mode)
    path = scorer.bounds.stage_path(alike)
    assert peak_bytes == scorer.memory.stages(alike, path.cuts)[0].peak_bytes
    # The bound rounds every collective down.
    assert 0 <= time_ns - scorer.bounds.candidate_ns(alike, path) <= 2 * 5 * 8


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_shards_within_a_node_equal_reshard_ranks(toys, mode, precision):
    problem = toys.problem(
        toys.graph(layers=5, tied=False), toys.cluster(nodes=2, devices=2), precision=precision
    )
    scorer, candidate = Scorer(problem), Candidate(dp_shard=4)
    choices = layer_choices(scorer, candidate)
    time_ns, peak_bytes = score_of(choices, choices.uniform(LayerOption(mode, "node")))
    alike = replace(candidate, recompute=mode, reshard_ranks=2)
    path = scorer.bounds.stage_path(alike)
    assert peak_bytes == scorer.memory.stages(alike, path.cuts)[0].peak_bytes
    # In a forward that waits for gathers the copies of what is kept are free.
    assert 0 <= time_ns - scorer.bounds.candidate_ns(alike, path) <= 2 * 5 * (8 + 30)


@pytest.mark.parametrize("parameters, ranks", [("reshard", 0), ("node", 2)])
def test_the_largest_moment_may_lie_in_forward(toys, parameters, ranks):
    graph = toys.graph(layers=5, tied=False)
    costs = {
        variant: tuple(replace(cost, forward_peak_bytes=Amount(0, 10**6)) for cost in structures)
        for variant, structures in graph.costs.items()
    }
    problem = toys.problem(replace(graph, costs=costs), toys.cluster(nodes=2, devices=2))
    scorer, candidate = Scorer(problem), Candidate(dp_shard=4)
    choices = layer_choices(scorer, candidate)
    _, peak_bytes = score_of(choices, choices.uniform(LayerOption("none", parameters)))
    alike = replace(candidate, reshard_ranks=ranks)
    path = scorer.bounds.stage_path(alike)
    assert peak_bytes == scorer.memory.stages(alike, path.cuts)[0].peak_bytes > 10**6


def test_what_stays_gathered_saves_gathers_and_takes_memory(toys):
    cluster = toys.cluster(nodes=2, devices=2)
    scorer = Scorer(toys.problem(toys.graph(layers=5), cluster, global_batch=4))
    choices = layer_choices(scorer, Candidate(dp_shard=4))
    back, stays = LayerOption("none", "reshard"), LayerOption("none", KEEP)
    slow_ns, small = score_of(choices, choices.uniform(back))
    fast_ns, large = score_of(choices, choices.uniform(stays))
    assert fast_ns < slow_ns
    # Each of 5 blocks holds 8 x 8 elements of 4 bytes; while the last one's backward runs, all
    # but that one and the one that would be gathered beside it are kept.
    assert large - small == 3 * 8 * 8 * 4


def test_options_are_ordered_by_memory_and_a_node_holds_its_part(toys):
    scorer = Scorer(toys.problem(toys.graph(layers=3), toys.cluster(nodes=2, devices=2)))
    choices = layer_choices(scorer, Candidate(dp_shard=4))
    held = choices.table.held_bytes[1].tolist()
    assert held == sorted(held) and len(choices.options) == 9
    by = dict(zip(choices.options, held, strict=True))
    whole = by["full", "keep"] - by["full", "reshard"]
    assert whole == 8 * 8 * 4
    assert by["full", "node"] - by["full", "reshard"] == whole // 2


@pytest.mark.parametrize(
    "candidate, why",
    [
        (Candidate(pp=2, dp_shard=2), "without a pipeline"),
        (Candidate(dp_shard=4, zero=2), "zero=3"),
        (Candidate(dp_replicate=4), "zero=3"),
    ],
)
def test_other_candidates_are_refused_with_the_reason(toys, candidate, why):
    scorer = Scorer(toys.problem())
    with pytest.raises(PlanError, match=why):
        layer_choices(scorer, candidate)
