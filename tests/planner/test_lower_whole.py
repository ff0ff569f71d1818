"""Replicas without shards in the toy model: which buckets are averaged, and when."""

from __future__ import annotations

from dataclasses import replace

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.graph import Parameter
from claw_plan.planner.lower import lower
from claw_plan.planner.score import Scorer
from claw_plan.simulator.simulate import simulate


def lowered(problem, candidate):
    scorer = Scorer(problem)
    return lower(problem, scorer.shards, candidate, scorer.bounds.stage_path(candidate).cuts).graph


def bucket_bytes(graph):
    names = zip(graph.work_bytes, graph.name, strict=True)
    return [int(size) for size, name in names if name == "bucket"]


def test_buckets_hold_all_gradients_once(toys):
    """A bucket is full once it holds 1000 bytes: after four blocks of 256, then the table."""
    problem = toys.problem(toys.graph(layers=4), global_batch=2)
    graph = lowered(problem, Candidate(dp_replicate=2, bucket_bytes=1000))
    assert bucket_bytes(graph) == [4 * 4 * 8 * 8, 4 * 64 * 8]


def test_what_has_no_dimension_is_in_them(toys):
    """As CLIP's logit_scale."""
    graph = toys.graph(layers=4)
    scale = Parameter(names=("scale",), shape=(), dtype="float32", trainable=True, units=(0,))
    problem = toys.problem(replace(graph, parameters=(*graph.parameters, scale)), global_batch=2)
    sizes = bucket_bytes(lowered(problem, Candidate(dp_replicate=2)))
    assert sum(sizes) == 4 * (64 * 8 + 4 * 8 * 8 + 1)


def test_a_bucket_is_averaged_beside_the_backward_of_what_comes_before(toys):
    problem = toys.problem(toys.graph(layers=4), global_batch=2)
    timeline = simulate(lowered(problem, Candidate(dp_replicate=2, bucket_bytes=1000)))
    first, last = (span for span in timeline.spans if span.name == "bucket")
    spans = {span.name: span for span in timeline.spans}
    assert first.start_ns == spans["0B0 unit 1"].end_ns == spans["0B0 unit 0"].start_ns
    assert last.start_ns == max(first.end_ns, spans["0B0 unit 0"].end_ns)


def test_only_the_last_microbatch_is_averaged(toys):
    problem = toys.problem(toys.graph(layers=4), global_batch=8)
    graph = lowered(problem, Candidate(dp_replicate=2, bucket_bytes=1000))
    assert len(bucket_bytes(graph)) == 2


def test_a_planned_bucket_leaves_inside_a_backward_where_a_run_has_recorded_so(toys):
    """Half way through the 2 ms of the last block but one, whose only tensor is ready there."""
    graph = toys.graph(layers=4)
    shares = {p.name: 1.0 for p in graph.parameters} | {"blocks.2.weight": 0.5}
    problem = toys.problem(replace(graph, ready_shares=shares), global_batch=2)
    timeline = simulate(lowered(problem, Candidate(dp_replicate=2, buckets=(2, 2, 1))))
    first, second, last = (span for span in timeline.spans if span.name == "bucket")
    parts = [span for span in timeline.spans if span.name == "0B0 unit 3"]
    assert [part.duration_ns for part in parts] == [1_000_000, 1_000_000]
    assert first.start_ns == parts[0].end_ns
    ends = {span.name: span.end_ns for span in timeline.spans}
    assert second.start_ns == max(first.end_ns, ends["0B0 unit 1"])
    assert last.start_ns == max(second.end_ns, ends["0B0 unit 0"])
