"""Data-parallel traffic of the toy model: what is gathered, reduced and when."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

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


@pytest.mark.parametrize(("blocks", "groups"), [(1, 4), (2, 2), (3, 2), (4, 1), (9, 1)])
def test_blocks_of_a_group_are_gathered_and_reduced_once(toys, blocks, groups):
    problem = toys.problem(toys.graph(layers=4), global_batch=2)
    together = Candidate(dp_shard=2, blocks_per_group=blocks)
    found = lower(problem, Scorer(problem).shards, together, ((0, 6),))
    names = Counter(name.split()[0] for name in found.graph.name)
    assert (names["gather"], names["reduce"]) == (1 + 2 * groups, 1 + groups)
    # The bytes are the same however they are grouped: the table, and four weights of 8 x 8.
    sizes = Counter()
    for _, works in found.moved[0]:
        for work in works:
            sizes[work.op] += work.bytes
    assert sizes["all_gather"] == 4 * (512 + 2 * 4 * 64)
    assert sizes["reduce_scatter"] == 4 * (512 + 4 * 64)


def test_groups_of_blocks_end_with_their_stage(toys):
    problem = toys.problem(toys.graph(layers=6), global_batch=8)
    together = Candidate(pp=2, dp_shard=2, zero=1, blocks_per_group=2)
    found = lower(problem, Scorer(problem).shards, together, ((0, 4), (4, 8)))
    names = Counter(name for name in found.graph.name if name.startswith("gather"))
    assert names == Counter({"gather root": 2} | {f"gather unit {u}": 1 for u in (1, 3, 4, 6)})


def test_a_group_is_gathered_before_its_first_block_either_way(toys):
    problem = toys.problem(toys.graph(layers=4), global_batch=2)
    graph, _ = lowered(problem, Candidate(dp_shard=2, blocks_per_group=2))
    spans = {}
    for span in simulate(graph).spans:
        spans.setdefault(span.name, []).append(span)
    first, second = spans["gather unit 3"]
    assert first.end_ns <= spans["0F0 unit 3"][0].start_ns
    assert second.end_ns <= spans["0B0 unit 4"][0].start_ns
    assert spans["reduce unit 3"][0].start_ns >= spans["0B0 unit 3"][0].end_ns


def test_what_neighbours_keep_is_gathered_among_them(toys):
    """Of two microbatches: forwards gather over all four ranks, backwards over two."""
    problem = toys.problem(toys.graph(layers=4), global_batch=8)
    near = Candidate(dp_shard=4, reshard_ranks=2)
    found = lower(problem, Scorer(problem).shards, near, ((0, 6),))
    gathers = Counter(
        (work.group_size, work.bytes)
        for _, works in found.moved[0]
        for work in works
        if work.op == "all_gather"
    )
    assert gathers == {(4, 4 * 512): 2, (4, 4 * 64): 2 * 4, (2, 4 * 64): 2 * 4}
    kept = [name for name in found.graph.name if name.startswith("keep")]
    assert len(kept) == 2 * 4


def test_a_pipeline_gathers_its_next_microbatch_among_neighbours_too(toys):
    """Stage 0 runs F0 F1 B0 F2 B1 F3 B2 B3; blocks stay gathered after a backward."""
    problem = toys.problem(toys.graph(layers=4), global_batch=16)
    near = Candidate(pp=2, dp_shard=4, reshard_ranks=2)
    found = lower(problem, Scorer(problem).shards, near, ((0, 3), (3, 6)))
    sizes = Counter(
        work.group_size
        for _, works in found.moved[0]
        for work in works
        if work.op == "all_gather" and work.bytes == 4 * 64
    )
    # F0 over all; F1, B0, B1, B2 among neighbours; F2, F3, B3 find what a backward left gathered.
    assert sizes == {4: 2 * 1, 2: 2 * 4}


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


def test_no_bound_gathers_it(toys):
    """A gather of one element would cost a latency that no step has."""
    scorer = Scorer(toys.problem(with_scale(toys.graph(layers=4)), global_batch=8))
    for zero in (1, 2, 3):
        for replicas in (1, 2):
            candidate = Candidate(dp_shard=2, dp_replicate=replicas, zero=zero)
            path = scorer.bounds.stage_path(candidate)
            simulated = scorer.step_time_ns(candidate, path.cuts)
            assert scorer.bounds.candidate_ns(candidate, path) <= simulated
