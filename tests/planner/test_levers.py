"""Each lever alone on a candidate that does not fit, against the memory model itself."""

from __future__ import annotations

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.levers import Lever, levers
from claw_plan.planner.score import Scorer

WHOLE = Candidate(dp_replicate=4, microbatch_size=4)


def peak(scorer, candidate):
    cuts = scorer.bounds.stage_path(candidate).cuts
    return max(stage.peak_bytes for stage in scorer.memory.stages(candidate, cuts))


def told(toys, memory_bytes, headroom=0.0):
    cluster = toys.cluster(devices=4, memory_bytes=memory_bytes)
    graph = toys.graph(layers=4, hidden=400)
    scorer = Scorer(toys.problem(graph, cluster, global_batch=16, headroom=headroom))
    stage = scorer.memory.stages(WHOLE, ((0, 6),))[0]
    return scorer, {lever.lever: lever for lever in levers(scorer, WHOLE, stage)}


@pytest.fixture
def needed(toys):
    return peak(told(toys, 1 << 40)[0], WHOLE)


def test_what_each_lever_leaves_missing_is_what_memory_says(toys, needed):
    scorer, found = told(toys, needed // 100 + 1)
    capacity = scorer.memory.capacity_bytes(WHOLE)
    ways = {
        "microbatch_size=2": Candidate(dp_replicate=4, microbatch_size=2),
        "recompute=full": Candidate(dp_replicate=4, microbatch_size=4, recompute="full"),
    }
    seen = 0
    for lever in found.values():
        if lever.change in ways:
            seen += 1
            assert lever.missing_bytes == peak(scorer, ways[lever.change]) - capacity
    assert seen


def test_the_smallest_change_that_would_do_is_told(toys, needed):
    """One byte short: of the degrees that fit the least is told."""
    scorer, found = told(toys, needed - 1)
    ways = {d: Candidate(dp_replicate=4 // d, tp=d, microbatch_size=4) for d in (2, 4)}
    least = min(d for d, way in ways.items() if peak(scorer, way) < needed)
    assert found["tp"] == Lever(lever="tp", change=f"tp={least}", missing_bytes=0)
    assert found["tp"].text() == f"tp={least} would do"


def test_headroom_is_a_lever_where_it_covers_what_is_missing(toys, needed):
    _, found = told(toys, needed + 8, headroom=0.5)
    assert found["headroom"].missing_bytes == 0
    _, found = told(toys, needed // 2, headroom=0.1)
    assert "headroom" not in found
