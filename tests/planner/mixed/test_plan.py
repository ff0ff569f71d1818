"""What a way over unlike devices may be."""

from __future__ import annotations

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.errors import PlanError
from claw_plan.planner.mixed.plan import MixedCandidate, MixedRank, Pipeline, pipeline_on


def rank(kind: int, **knobs: object) -> MixedRank:
    return MixedRank(kind=kind, place=0, candidate=Candidate(pp=2, **knobs))  # type: ignore[arg-type]


CUTS = ((0, 3), (3, 6))


def test_devices_are_counted_by_kind():
    ranks = (rank(0, tp=2, microbatch_size=4), rank(1, dp_shard=4))
    mixed = MixedCandidate(pipelines=(Pipeline(batch=8, ranks=ranks, cuts=CUTS),))
    assert mixed.num_devices == 6
    assert [mixed.devices_of(kind) for kind in range(3)] == [2, 4, 0]
    assert mixed.short(("slow", "fast")) == (
        "slow (tp=2, microbatch 4) then fast (dp=4, zero 3, microbatch 1)"
    )


def test_shares_are_told_where_there_are_several():
    pipelines = tuple(
        pipeline_on(kind, Candidate(dp_shard=2), ((0, 6),), batch)
        for kind, batch in enumerate((2, 6))
    )
    text = MixedCandidate(pipelines=pipelines).short(("slow", "fast"))
    assert text.startswith("2 samples: slow (dp=2") and "; 6 samples: fast (dp=2" in text


@pytest.mark.parametrize(
    "ranks, cuts, batch, message",
    [
        ((), (), 8, "one rank or more"),
        ((rank(0), rank(1)), ((0, 6),), 8, "do not hold 1 stages"),
        ((rank(0), rank(1, schedule="GPipe")), CUTS, 8, "one schedule"),
        ((rank(0), rank(1, dp_shard=2)), CUTS, 8, "microbatches of one size"),
        ((rank(0, microbatch_size=3), rank(1, microbatch_size=3)), CUTS, 8, "does not divide"),
    ],
)
def test_a_pipeline_that_cannot_run_is_refused(ranks, cuts, batch, message):
    with pytest.raises(PlanError, match=message):
        Pipeline(batch=batch, ranks=ranks, cuts=cuts)
