"""Buffers of codecs, counted by hand; measured ones are in tests/executor/test_coded_memory.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.encoding_memory import (
    carries_codes,
    largest_bucket,
    mean_bytes,
    scattered_bytes,
)
from claw_plan.planner.score import Scorer
from claw_plan.planner.shards import GroupSize
from claw_plan.profiles.codecs import describe_codec


def test_of_a_mean_most_is_there_when_all_means_are_decoded(toys):
    """4,096 elements, four ranks: 1,024 of fp16 are 2,048 bytes from each."""
    problem, candidate = toys.problem(), Candidate(dp_replicate=4, codec="fp16")
    own = 4 * 1024
    assert mean_bytes(problem, candidate, 4096) == own + 2048 + 4 * 2048 + 4 * 4096


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_of_scattered_shards_codes_are_there_three_times(toys, kind):
    """Made, put together, and come; or on an accelerator beside the residual that is new."""
    problem = toys.problem(cluster=toys.cluster(kind=kind))
    codes = 4 * describe_codec("int8").wire_bytes(1024)
    made = 0 if kind == "cpu" else 4 * 4096
    both = 2 * codes + 2 * 4 * 1024
    taken = scattered_bytes(problem, Candidate(dp_shard=4, codec="int8"), 1024)
    assert taken == max(3 * codes, both, codes + made)


def test_a_bucket_holds_no_more_than_makes_it_full_and_one_parameter():
    groups = [GroupSize(trainable_shard=100, largest=60), GroupSize(trainable_shard=50, largest=9)]
    assert largest_bucket(Candidate(bucket_bytes=40), groups) == 10 + 60
    assert largest_bucket(Candidate(bucket_bytes=1 << 20), groups) == 150


def test_factors_and_whole_gradients_are_no_codes():
    coded = Candidate(dp_replicate=2, codec="int8")
    assert carries_codes(coded)
    for other in (
        replace(coded, codec="none"),
        replace(coded, dp_replicate=1),
        replace(coded, codec="low_rank"),
    ):
        assert not carries_codes(other)


@pytest.mark.parametrize(
    "knobs", [{"dp_replicate": 2}, {"dp_replicate": 2, "pp": 2}, {"dp_shard": 2}]
)
def test_where_gradients_are_large_they_are_the_peak(toys, knobs):
    """Parameters of a million elements and passes that keep next to nothing."""
    graph = toys.graph(layers=4, width=1000, hidden=1)
    problem = toys.problem(graph, toys.cluster(devices=4), global_batch=4)
    candidate = Candidate(**knobs, codec="fp16")
    scorer = Scorer(problem)
    cuts = scorer.bounds.stage_path(candidate).cuts
    plain = scorer.memory.rank(replace(candidate, codec="none"), 0, cuts).peak_bytes
    assert scorer.memory.rank(candidate, 0, cuts).peak_bytes > plain
