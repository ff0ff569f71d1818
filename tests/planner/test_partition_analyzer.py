"""Stages of a model added up by hand, and by the scorer's own figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.errors import PlanError
from claw_plan.planner.partition_analyzer import (
    PartitionAnalyzer,
    partition_analyzer,
    unit_ranges,
)
from claw_plan.planner.score import Scorer

SMALL = Path(__file__).parents[2] / "examples" / "gpt_small.py"


def toy(toys, pp, tp=1, cluster=False):
    """Blocks of 1,000 flops a sample forward and 2,000 backward; ends of 100 and 2,000 forward."""
    problem = toys.problem(toys.graph(layers=4), toys.cluster(devices=8))
    candidate = Candidate(pp=pp, tp=tp, microbatch_size=2)
    scorer = Scorer(problem) if cluster else None
    return PartitionAnalyzer(graph=problem.graph, candidate=candidate, scorer=scorer)


def test_two_stages_by_hand(toys):
    """Two samples; a sample takes 300 in the prologue, 3,000 a block and 6,000 in the epilogue."""
    report = toy(toys, 2).report()
    flops = [stage.flops for stage in report.stages]
    assert sum(flops) == 2 * (300 + 4 * 3000 + 6000)
    mean = sum(flops) / 2
    assert report.imbalance == pytest.approx(max(flops) / mean - 1)
    assert report.variation == pytest.approx(abs(flops[0] - flops[1]) / 2 / mean)
    assert report.critical_stage == flops.index(max(flops))
    assert abs(flops[0] - flops[1]) <= 2 * 3000


def test_parameters_are_those_of_the_stages(toys):
    """64 x 8 of the tied table on both ends, 8 x 8 a block; half a block each under tp=2."""
    report = toy(toys, 2).report()
    blocks = [len([u for u in stage.units if u.startswith("block")]) for stage in report.stages]
    assert [stage.parameters for stage in report.stages] == [512 + 64 * n for n in blocks]
    halved = toy(toys, 2, tp=2).report()
    blocks = [len([u for u in stage.units if u.startswith("block")]) for stage in halved.stages]
    assert [stage.parameters for stage in halved.stages] == [512 + 32 * n for n in blocks]
    assert all(stage.exchanged_bytes > 0 for stage in halved.stages)


def test_what_is_sent_leaves_every_stage_but_the_last(toys):
    sent = [stage.sent_bytes for stage in toy(toys, 4).report().stages]
    assert sent == [200, 200, 200, 0]  # 100 bytes a sample


def test_with_a_cluster_times_and_peaks_are_the_scorers(toys):
    analyzer = toy(toys, 2, cluster=True)
    report, scorer = analyzer.report(), analyzer.scorer
    cuts = scorer.bounds.stage_path(analyzer.candidate).cuts
    memory = scorer.memory.stages(analyzer.candidate, cuts)
    assert [stage.peak_bytes for stage in report.stages] == [m.peak_bytes for m in memory]
    path = scorer.bounds.stage_path(analyzer.candidate)
    assert [s.time_ns for s in report.stages] == [
        forward + backward
        for forward, backward in zip(path.forward_ns, path.backward_ns, strict=True)
    ]


def test_more_stages_than_blocks(toys):
    with pytest.raises(PlanError, match="4 blocks make no 5 stages"):
        toy(toys, 5).report()


def test_from_python_on_a_model_file():
    report = partition_analyzer(SMALL, pp=2, tp=2, seq_len=64).report()
    assert len(report.stages) == 2 and report.tp == 2
    assert report.stages[0].units[0] == "prologue"
    with pytest.raises(PlanError, match="tp=7"):
        partition_analyzer(SMALL, tp=7)


def test_ranges_of_units():
    assert unit_ranges(["h.0"]) == "h.0" and unit_ranges(["a", "b", "c"]) == "a to c"
