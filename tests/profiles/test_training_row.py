from __future__ import annotations

from claw_plan.profiles.training_row import PublishedPlan


def test_microbatches_are_the_batch_over_replicas_and_samples() -> None:
    plan = PublishedPlan(
        dp=16, tp=4, pp=8, cp=1, ep=1, etp=1, vpp=1, micro_batch=2, global_batch=2048,
        sharding="zero1",
    )  # fmt: skip
    assert plan.num_microbatches == 64
