"""Shards through codecs on the toy model: what moves, over whom, and what the step waits for."""

from __future__ import annotations

import pytest

from claw_plan.planner.averaging import averaging, scattering
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.lower import lower
from claw_plan.planner.memory_states import held_parts
from claw_plan.planner.score import Scorer
from claw_plan.profiles.codecs import describe_codec


def lowered(problem, candidate):
    scorer = Scorer(problem)
    return lower(problem, scorer.shards, candidate, scorer.bounds.stage_path(candidate).cuts)[0]


def moved(graph, kind="dp_comm"):
    return [
        (name, int(size))
        for name, of, size in zip(graph.name, graph.kind, graph.work_bytes, strict=True)
        if of == kind and size
    ]


@pytest.mark.parametrize("codec", ["int8", "fp16"])
def test_shards_exchange_codes_of_their_parts(toys, codec):
    """Two blocks of 64 elements: two ranks' parts of 32, encoded apart, of two microbatches."""
    problem = toys.problem(toys.graph(layers=2), global_batch=4)
    sent = moved(lowered(problem, Candidate(dp_shard=2, codec=codec)))
    part = describe_codec(codec).wire_bytes(32)
    assert [size for name, size in sent if name.startswith("reduce unit")] == [2 * part] * 4
    mean = scattering(problem, codec, 64, 2, 1)
    assert [cost.moves[0].op for _, cost in mean.phases] == ["all_to_all"]
    assert mean.is_waited_for


def test_replicas_of_shards_meet_at_the_end_of_the_step(toys):
    """Shards are reduced whole; then each rank's elements travel as codes, in one bucket."""
    problem = toys.problem(toys.graph(layers=2), global_batch=4)
    candidate = Candidate(dp_shard=2, dp_replicate=2, codec="int8")
    graph = lowered(problem, candidate)
    whole = moved(lowered(problem, Candidate(dp_shard=2, dp_replicate=2)))
    sent = moved(graph)
    reduced = [entry for entry in whole if entry[0].startswith("reduce")]
    assert [entry for entry in sent if entry[0].startswith("reduce")] == reduced
    assert not [name for name, _ in sent if name.startswith("all-reduce")]
    names = [name for name in graph.name if name.endswith("over dp_replicate")]
    assert names[0] == "flags over dp_replicate" and names[-1] == "decode over dp_replicate"
    owned = sum(size for name, size in whole if name.startswith("all-reduce")) // 4
    mean = averaging(problem, candidate, owned)
    exchanged = [size for name, size in sent if name == "gradients over dp_replicate"]
    assert exchanged[0] == mean.phases[0].cost.bytes


def test_a_pipeline_averages_codes_once_a_step(toys):
    problem = toys.problem(toys.graph(layers=4), global_batch=4)
    candidate = Candidate(pp=2, dp_replicate=2, codec="int4", microbatch_size=1)
    names = [name for name in lowered(problem, candidate).name if "over dp_replicate" in name]
    # Of each of the two ranks: what there is, encode and exchange, average and gather, decode.
    assert sorted(names) == sorted(
        2 * (2 * ["encode over dp_replicate", "gradients over dp_replicate"]
             + ["flags over dp_replicate", "decode over dp_replicate"])
    )  # fmt: skip


def test_residuals_are_of_whole_gradients_where_shards_encode(toys):
    """A worker encodes all parts, 4 bytes an element; replicas encode what they own."""
    problem = toys.problem(toys.graph(layers=2), global_batch=4)
    shards, spans = Scorer(problem).shards, ((0, 4),)
    parts = held_parts(problem, shards, Candidate(dp_shard=2, codec="int8"), spans)
    assert parts["residuals"] == 2 * parts["parameters"]
    both = Candidate(dp_shard=2, dp_replicate=2, codec="int8")
    parts = held_parts(problem, shards, both, spans)
    assert parts["residuals"] == pytest.approx(1.5 * parts["parameters"], rel=0.01)
    assert "residuals" not in held_parts(problem, shards, Candidate(dp_shard=2), spans)
