"""What pinned knobs mean together, and what is said where no candidate has them."""

from __future__ import annotations

import pytest

from claw_plan.planner.errors import PlanError
from claw_plan.planner.pinned import batch_refusal, check_pinned, pinned_candidate, why_none


def test_a_schedule_brings_its_stages_and_stages_a_schedule():
    assert pinned_candidate({"schedule": "ZBVZeroBubble"}).stages_per_rank == 2
    assert pinned_candidate({"stages_per_rank": 3}).schedule == "Interleaved1F1B"


@pytest.mark.parametrize(
    ("fix", "said"),
    [
        ({"dp_shard": 8}, "asks for 8 devices (pp x dp x tp); the cluster 'toy' has 6"),
        ({"cp": 2, "tp": 2}, "cp x tp: no test proves"),
        ({"tp": 1, "sequence_parallel": True}, "acts with tp above 1 only"),
        ({"codec": "int9"}, "codec=int9: there is no codec 'int9'"),
        ({"codec": "one_bit", "dp_shard": 2}, "use dp_replicate above 1, dp_shard=1 and pp=1"),
        ({"codec": "one_bit", "pp": 2}, "use dp_replicate above 1, dp_shard=1 and pp=1"),
        ({"codec": "one_bit", "offload": "optimizer"}, "use offload=none"),
        ({"codec": "zero_one:4", "tp": 2}, "tensor parallelism; use tp=1"),
        ({"codec": "int8", "dp_replicate": 1, "dp_shard": 1}, "dp_replicate, dp_shard or cp"),
        ({"codec": "int8", "pp": 6}, "dp_replicate, dp_shard or cp"),
        ({"codec": "int8", "collective": "tree"}, "use one of auto, ring"),
        ({"codec": "int8", "collective": "hierarchical"}, "nothing would be encoded"),
        ({"collective": "ring", "tp": 2}, "tensor parallelism; use tp=1"),
        ({"mesh_order": ("pp", "cp", "dp_replicate", "tp", "dp_shard")}, "or behind both"),
    ],
)
def test_values_that_no_model_could_have(toys, fix, said):
    with pytest.raises(PlanError) as caught:
        check_pinned(fix, toys.cluster(devices=6))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "fix", [{"codec": "int8", "pp": 2}, {"codec": "one_bit", "dp_replicate": 3}, {"codec": "none"}]
)
def test_codecs_that_may_act_are_let_through(toys, fix):
    check_pinned(fix, toys.cluster(devices=6))


def test_the_nearest_batches_are_named(toys):
    assert batch_refusal({"dp_shard": 2, "microbatch_size": 2}, 8) == ""
    assert batch_refusal({"dp_shard": 4}, 10).endswith("nearest: 8 or 12")
    assert why_none({"dp_shard": 4}, 10, toys.cluster()).endswith("nearest: 8 or 12")


def test_knobs_that_cannot_act_are_explained(toys):
    said = why_none({"pp": 1, "schedule": "GPipe"}, 8, toys.cluster())
    assert "--fix pp=1,schedule=GPipe" in said and "only where pp is above 1" in said
    said = why_none({"pp": 2, "schedule": "DualPipeV", "microbatch_size": 4}, 8, toys.cluster())
    assert "DualPipeV needs at least as many microbatches as stages" in said
