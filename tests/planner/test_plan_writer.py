"""What a plan says of its prediction; names of modules are in test_plan and test_plan_stages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.graph import Unit
from claw_plan.planner.plan_names import block_patterns
from claw_plan.planner.plan_writer import HALF_WIDTH, predict
from claw_plan.planner.score import Scorer


def test_the_interval_widens_with_what_times_rest_on(toys):
    scorer = Scorer(toys.problem())
    candidate = Candidate()
    scored = scorer.score(candidate, scorer.bounds.stage_path(candidate).cuts)
    prediction = predict(scored, "catalogue", {})
    low, high = prediction.interval_ms
    assert low == pytest.approx(prediction.step_time_ms * 0.75, abs=1e-3)
    assert high == pytest.approx(prediction.step_time_ms * 1.25, abs=1e-3)
    assert sorted(HALF_WIDTH.values()) == list(HALF_WIDTH.values())


def test_memory_is_listed_by_stage(toys):
    scorer = Scorer(toys.problem())
    candidate = Candidate(pp=2)
    scored = scorer.score(candidate, scorer.bounds.stage_path(candidate).cuts)
    assert predict(scored, "catalogue", {}).memory_gib == [
        round(stage.peak_bytes / 2**30, 3) for stage in scored.memory
    ]


def test_blocks_of_other_widths_in_one_container_are_named_one_by_one() -> None:
    """ConvNeXt's stages: a pattern for each width would divide every stage by the rules of all."""
    blocks = [
        Unit(name=name, modules=(name,), structure=structure)
        for name, structure in (("stages.0", 0), ("stages.1", 1), ("head.0", 2), ("head.1", 2))
    ]
    graph: Any = SimpleNamespace(blocks=blocks)
    assert block_patterns(graph, [0]) == ["stages.0"]
    assert block_patterns(graph, [0, 1]) == ["stages[*]"]
    assert block_patterns(graph, [2]) == ["head[*]"]
