"""The end of the averages of replicas without shards, against the simulated step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from claw_plan.planner.averaging_bound import Averaged, AveragingBounds
from claw_plan.planner.averaging_buckets import AFTER_ALL
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.score import Scorer


def test_the_last_bucket_waits_for_the_network_or_for_its_gradients(toys, monkeypatch):
    """Three buckets of 10 behind units that 30, 20 and 0 come after; the last pass ends at 100."""
    bounds = AveragingBounds(toys.problem(), None)
    buckets = [Averaged(2, 10, True), Averaged(1, 10, True), Averaged(AFTER_ALL, 10, True)]
    monkeypatch.setattr(AveragingBounds, "buckets", lambda *_: buckets)
    left = {2: 30, 1: 20}.__getitem__
    assert bounds.end_ns(Candidate(), (), 100, left) == 110
    buckets[1] = Averaged(1, 60, True)
    assert bounds.end_ns(Candidate(), (), 100, left) == 80 + 60 + 10
    buckets[:] = [Averaged(2, 10, False), Averaged(AFTER_ALL, 7, False)]
    assert bounds.end_ns(Candidate(), (), 100, left) == 117


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("bucket_bytes", [1, 300, 1000, 25_000_000])
@pytest.mark.parametrize("batch", [2, 4])
def test_it_is_the_simulated_end_but_for_the_loss(toys, kind, bucket_bytes, batch):
    """What all ranks meet for afterwards takes 5 us and 8 bytes at 1e6 bytes/s."""
    cluster = toys.cluster(devices=2, kind=kind)
    graph = toys.graph(layers=4)
    problem = toys.problem(graph, cluster, global_batch=batch)
    candidate = Candidate(dp_replicate=2, bucket_bytes=bucket_bytes)
    scorer = Scorer(problem)
    path = scorer.bounds.stage_path(candidate)
    simulated = scorer.step_time_ns(candidate, path.cuts)
    bound = scorer.bounds.candidate_ns(candidate, path)
    buckets = len(scorer.bounds._means.buckets(candidate, path.cuts))
    assert 0 <= simulated - bound - (5_000 + 8_000) <= buckets  # each is rounded down


def test_averages_at_the_end_of_a_pipeline_count_too(toys, monkeypatch):
    """A stage holds three blocks and the tied table, in one bucket with four flags."""
    problem = toys.problem(toys.graph(layers=4), toys.cluster(devices=4), global_batch=8)
    scorer = Scorer(problem)
    replicas = Candidate(pp=2, dp_replicate=2)
    path = scorer.bounds.stage_path(replicas)
    found = scorer.bounds.streams_ns(replicas, path)
    shards = replace(replicas, dp_replicate=1, dp_shard=2)
    assert scorer.bounds._means.buckets(shards, path.cuts) == ()
    monkeypatch.setattr(AveragingBounds, "buckets", lambda *_: ())
    averaged_ns = found - scorer.bounds.streams_ns(replicas, path)
    assert averaged_ns == 5_000 + 1_000 * 4 * (3 * 64 + 512 + 4) - 1  # rounded down


@pytest.mark.parametrize("axes", [{}, {"dp_replicate": 2}, {"dp_shard": 2}, {"pp": 2}])
@pytest.mark.parametrize("codec", ["int8", "fp16"])
def test_where_sequences_are_shared_codes_are_bound_too(toys, axes, codec):
    """Ranks of cp share states: their reductions are codes without replicas, whole with them."""
    graph = replace(toys.graph(layers=4, width=64), cp=2, cp_comm_type="all_gather")
    problem = toys.problem(graph, toys.cluster(nodes=2, devices=2), global_batch=8)
    scorer, candidate = Scorer(problem), Candidate(cp=2, codec=codec, **axes)
    path = scorer.bounds.stage_path(candidate)
    simulated = scorer.step_time_ns(candidate, path.cuts)
    bound = max(
        scorer.bounds.candidate_ns(candidate, path), scorer.bounds.streams_ns(candidate, path)
    )
    assert 0.6 * simulated < bound <= simulated
