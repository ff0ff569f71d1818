"""Scores of the toy model worked out by hand."""

from __future__ import annotations

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.score import Scorer

MS = 1_000_000


def scored(problem, candidate):
    scorer = Scorer(problem)
    return scorer.score(candidate, scorer.bounds.stage_path(candidate).cuts)


def test_one_device(toys):
    """6.1 ms forward and 12.2 ms backward a sample, then 2150 ns of optimizer."""
    result = scored(toys.problem(global_batch=2), Candidate())
    assert result.step_time_ns == 36_600_000 + 2150
    assert result.parts_ns["compute"] == 36_600_000
    assert result.parts_ns["optimizer"] == 2150
    assert result.samples_per_s == pytest.approx(2 / 0.03660215)
    assert result.tokens_per_s == pytest.approx(8 * 2 / 0.03660215)
    # 36,600 flops at the toy's 1e6 flop/s are 36.6 ms: all but the optimizer is model flops.
    assert result.mfu == pytest.approx(36_600_000 / 36_602_150)
    assert result.communication_share == 0 and result.sources == {"analytic": 1.0}


def test_recompute_is_no_model_flop(toys):
    result = scored(toys.problem(global_batch=2), Candidate(recompute="full"))
    assert result.parts_ns["recompute"] == 8 * MS
    assert result.mfu == pytest.approx(36.6 / 44.60215)
    assert result.compute_utilisation == pytest.approx(44.6 / 44.60215)


def test_the_parts_of_the_busiest_stage_are_its_whole_step(toys):
    graph = toys.graph(layers=4)
    cluster = toys.cluster(nodes=2, devices=4)
    for candidate in (
        Candidate(pp=4),
        Candidate(dp_shard=8),
        Candidate(pp=2, tp=2, dp_shard=2, schedule="GPipe"),
        Candidate(tp=4, dp_replicate=2),
    ):
        result = scored(toys.problem(graph, cluster, global_batch=16), candidate)
        assert sum(result.parts_ns.values()) == result.step_time_ns


def test_a_pipeline_of_equal_stages_waits_p_minus_1_passes(toys):
    """Bubble (p - 1)(F + B) of two-block stages: 3 x 6 ms, seen on every stage."""
    graph = toys.graph(layers=8, hidden=0, tied=False, ends=False)
    problem = toys.problem(graph, toys.cluster(devices=4), global_batch=8, latency_ns=0)
    result = scored(problem, Candidate(pp=4))
    assert result.parts_ns["compute"] == 8 * 6 * MS
    assert 3 * 6 * MS <= result.parts_ns["pp_bubble"] <= 3 * 6 * MS + 2000
