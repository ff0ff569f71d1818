"""Data-parallel traffic of the toy model: what is gathered, reduced and when."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.graph import Parameter
from claw_plan.planner.lower import lower
from claw_plan.planner.score import Scorer
from claw_plan.profiles.cost import OpCost
from claw_plan.simulator.simulate import simulate


def lowered(problem, candidate):
    scorer = Scorer(problem)
    path = scorer.bounds.stage_path(candidate)
    return lower(problem, scorer.shards, candidate, path.cuts).graph, path.cuts


def test_sharded_forward_gathers_every_group_and_backward_again(toys):
    problem = toys.problem(toys.graph(layers=4), global_batch=2)
    for zero, gathers in ((3, 1 + 4 + 4), (2, 1 + 4)):
        candidate = Candidate(dp_shard=2, zero=zero)
        graph, _ = lowered(problem, candidate)
        names = Counter(name.split()[0] for name in graph.name)
        assert names["gather"] == gathers  # the root once, blocks in forward (and backward)
        assert names["reduce"] == 5  # one a group


def test_what_a_step_of_four_microbatches_gathers_and_reduces(toys):
    """Root and four blocks; with zero=3 each pass, with 2 and 1 once a step."""
    problem = toys.problem(toys.graph(layers=4), global_batch=8)
    for zero, gathers, reductions in ((3, 4 * (1 + 4 + 4), 4 * 5), (2, 5, 4 * 5), (1, 5, 5)):
        graph, _ = lowered(problem, Candidate(dp_shard=2, zero=zero))
        names = Counter(name.split()[0] for name in graph.name)
        assert (names["gather"], names["reduce"]) == (gathers, reductions)


def test_sharded_pipeline_gathers_once_and_reduces_once(toys):
    problem = toys.problem(toys.graph(layers=4), global_batch=8)
    candidate = Candidate(pp=2, dp_shard=2, zero=1)
    graph, _ = lowered(problem, candidate)
    names = Counter(name.split()[0] for name in graph.name)
    assert names["gather"] == 2 + 4  # a root on both ends, four blocks
    assert names["reduce"] == 2 + 4


def test_buckets_hold_all_gradients_once(toys):
    problem = toys.problem(toys.graph(layers=4), global_batch=2)
    candidate = Candidate(dp_replicate=2, bucket_bytes=1000)
    graph, _ = lowered(problem, candidate)
    sizes = [
        int(size)
        for size, name in zip(graph.work_bytes, graph.name, strict=True)
        if name == "bucket"
    ]
    # A bucket is full once it holds 1000 bytes: after four blocks of 256, then the table.
    assert sizes == [4 * 4 * 8 * 8, 4 * 64 * 8]


def test_the_gather_of_the_next_block_runs_beside_this_one(toys):
    """Accelerators overlap: a block's gather starts when the block before it starts."""
    problem = toys.problem(toys.graph(layers=4), global_batch=2)
    timeline = simulate(lowered(problem, Candidate(dp_shard=2))[0])
    spans = {span.name: span for span in reversed(timeline.spans)}
    for block in (2, 3, 4):
        running = spans[f"0F0 unit {block - 1}"]
        gather = spans[f"gather unit {block}"]
        assert running.start_ns <= gather.start_ns < running.end_ns


def test_clipping_reads_and_scales_all_gradients_and_meets_once(toys):
    problem = toys.problem(toys.graph(layers=4), global_batch=2)
    clipped = replace(problem, training=replace(problem.training, clip_norm=1.0))
    for one, names in ((problem, 0), (clipped, 1)):
        graph, _ = lowered(one, Candidate(dp_shard=2))
        assert graph.name.count("clip") == graph.name.count("norm") == names
    graph, _ = lowered(clipped, Candidate())
    assert graph.name.count("clip") == 1 and graph.name.count("norm") == 0  # nobody to meet


def test_on_gloo_nothing_overlaps(toys):
    cluster = toys.cluster(devices=2, kind="cpu")
    problem = toys.problem(toys.graph(layers=4), cluster, global_batch=2)
    timeline = simulate(lowered(problem, Candidate(dp_shard=2))[0])
    assert {span.stream for span in timeline.spans} == {"stage 0 compute"}


def test_hybrid_sharding_all_reduces_the_shards_over_the_replicas(toys):
    problem = toys.problem(toys.graph(layers=4), toys.cluster(nodes=2), global_batch=8)
    graph, _ = lowered(problem, Candidate(dp_replicate=2, dp_shard=2))  # two microbatches
    sizes = {
        name: int(size)
        for name, size in zip(graph.name, graph.work_bytes, strict=True)
        if name.startswith("all-reduce")
    }
    assert sum(name.startswith("all-reduce") for name in graph.name) == 5  # on the last one only
    assert sizes == {
        "all-reduce root": 4 * 512 // 2,
        **{f"all-reduce unit {block}": 4 * 64 // 2 for block in (1, 2, 3, 4)},
    }


def test_gradients_of_later_microbatches_are_added_up(toys, monkeypatch):
    """Whole ones, 12 bytes each; with sharding only the shards; after the first, never."""
    asked = []

    def op(self, work):
        if work.target == "aten.add_":
            asked.append(work.bytes)
        return OpCost(ns=1, source="analytic")

    problem = toys.problem(toys.graph(layers=4), global_batch=4)
    monkeypatch.setattr(type(problem.cost), "op", op)
    elements = 64 * 8 + 4 * 8 * 8
    for candidate, additions, size in (
        (Candidate(), 3, elements),
        (Candidate(microbatch_size=4), 0, elements),
        (Candidate(dp_replicate=2), 1, elements),
        (Candidate(dp_shard=2), 1, elements // 2),
        (Candidate(dp_shard=2, zero=1), 1, elements),
    ):
        asked.clear()
        graph, _ = lowered(problem, candidate)
        assert graph.name.count("accumulate gradients") == additions
        assert asked == [12 * size] * additions


def with_scale(graph):
    """With a parameter without dimensions, as CLIP's logit_scale."""
    scale = Parameter(names=("scale",), shape=(), dtype="float32", trainable=True, units=(0,))
    return replace(graph, parameters=(*graph.parameters, scale))


def test_what_fully_shard_leaves_alone_meets_once_a_step(toys):
    """Four bytes and a flag of four, over the shards and then over the replicas."""
    problem = toys.problem(with_scale(toys.graph(layers=4)), global_batch=8)
    for candidate, times in (
        (Candidate(dp_shard=2), 1),
        (Candidate(dp_shard=2, dp_replicate=2), 2),
    ):
        graph, _ = lowered(problem, candidate)
        sizes = [
            int(size)
            for size, name in zip(graph.work_bytes, graph.name, strict=True)
            if name.startswith("gradients over")
        ]
        assert sizes == [8] * times


def test_it_is_in_the_replicas_buckets(toys):
    problem = toys.problem(with_scale(toys.graph(layers=4)), global_batch=2)
    graph, _ = lowered(problem, Candidate(dp_replicate=2))
    buckets = zip(graph.work_bytes, graph.name, strict=True)
    sizes = [int(size) for size, name in buckets if name == "bucket"]
    assert sum(sizes) == 4 * (64 * 8 + 4 * 8 * 8 + 1)


def test_no_bound_gathers_it(toys):
    """A gather of one element would cost a latency that no step has."""
    scorer = Scorer(toys.problem(with_scale(toys.graph(layers=4)), global_batch=8))
    for zero in (1, 2, 3):
        for replicas in (1, 2):
            candidate = Candidate(dp_shard=2, dp_replicate=replicas, zero=zero)
            path = scorer.bounds.stage_path(candidate)
            simulated = scorer.step_time_ns(candidate, path.cuts)
            assert scorer.bounds.candidate_ns(candidate, path) <= simulated
