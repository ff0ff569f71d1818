"""The front beside brute force, and the least memory that will do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.planner.errors import InfeasiblePlan
from claw_plan.planner.pareto import PRECISION, front, least_memory, limited, undominated
from claw_plan.planner.score import Scorer
from claw_plan.planner.space import Space

FIX = {"stages_per_rank": 1, "recompute": "none", "blocks_per_group": 1, "reshard_ranks": 0}


@dataclass(frozen=True)
class Dot:
    figures: Any


@pytest.fixture(scope="module")
def problem(toys):
    """A little more than the fastest plan needs, so that limits bite."""
    cluster = toys.cluster(devices=2, memory_bytes=30_000, kind="cpu")
    return toys.problem(toys.graph(layers=2, hidden=400), cluster, global_batch=4)


@given(st.lists(st.tuples(*[st.integers(0, 6)] * 3), max_size=12))
def test_the_front_is_what_nothing_beats(figures):
    dots = [Dot(each) for each in figures]
    kept = {dot.figures for dot in undominated(dots)}
    expected = {
        one
        for one in figures
        if not any(
            other != one and all(a <= b for a, b in zip(other, one, strict=True))
            for other in figures
        )
    }
    assert kept == expected


def test_the_fastest_of_all_is_on_the_front_and_nothing_found_beats_it(problem):
    points = front(problem, FIX)
    scorer, space = Scorer(problem), Space(problem, FIX)
    times = [
        scorer.step_time_ns(candidate, scorer.bounds.stage_path(candidate).cuts)
        for group in space.groups()
        for candidate in space.members(group)
        if scorer.memory.fits(candidate, scorer.bounds.stage_path(candidate).cuts)
    ]
    assert points[0].scored.step_time_ns == min(times)
    assert undominated(points) == points and all(point.scored.fits for point in points)


def test_the_least_memory_is_that_of_the_smallest_candidate(problem):
    """Within PRECISION of the usable memory, against every candidate's own peak."""
    scorer, space = Scorer(problem), Space(problem, FIX)
    peaks = [
        max(
            stage.peak_bytes / stage.capacity_bytes
            for stage in scorer.memory.stages(candidate, scorer.bounds.stage_path(candidate).cuts)
        )
        for group in space.groups()
        for candidate in space.members(group)
    ]
    found = least_memory(problem, FIX)
    part = (1 - found.training.memory_headroom) / (1 - problem.training.memory_headroom)
    assert part - PRECISION - 1e-3 <= min(peaks) <= part + 1e-3


def test_nothing_fits_at_all(problem):
    with pytest.raises(InfeasiblePlan, match="the least cannot be sought"):
        least_memory(limited(problem, 0.001), FIX)
