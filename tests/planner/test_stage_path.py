"""The longest way through a pipeline, by hand."""

from __future__ import annotations

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.stage_path import StagePath, UnitTime


def test_what_a_cut_divides():
    """All that runs; where some blocks of each stage run again, the rest."""
    time = UnitTime(forward=10, whole=25, inputs=12, weights=11, again=10)
    assert time.balanced(Candidate(recompute="full")) == 10 + 23 + 10
    assert time.balanced(Candidate(recompute="full", recompute_blocks=1)) == 10 + 23


def test_the_longest_way():
    """Two ranks, 3 microbatches: the second's 3 x (2 + 5) after the first's forward."""
    path = StagePath(
        cuts=((0, 2), (2, 4)),
        forward_ns=(3, 2),
        backward_ns=(4, 5),
        inputs_ns=(4, 5),
        weights_ns=(0, 0),
        ranks=((0,), (1,)),
    )
    assert path.least_work_ns(1) == 7
    # And then the first's last backward.
    assert path.longest_ns(3) == 3 + 3 * 7 + 4
