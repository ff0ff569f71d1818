"""Knobs, their products, and --fix."""

from __future__ import annotations

import pytest

from claw_plan.planner.candidate import Candidate, parse_fix
from claw_plan.planner.errors import PlanError


def test_products():
    candidate = Candidate(pp=2, dp_replicate=3, dp_shard=4, tp=5, microbatch_size=2)
    assert (candidate.dp, candidate.num_devices) == (12, 120)
    assert candidate.num_microbatches(48) == 2


@pytest.mark.parametrize("batch", [0, 12, 50])
def test_a_batch_that_does_not_divide(batch):
    with pytest.raises(PlanError, match="does not divide into dp=12 x microbatch_size=2"):
        Candidate(dp_replicate=3, dp_shard=4, microbatch_size=2).num_microbatches(batch)


def test_degrees_are_at_least_one():
    with pytest.raises(PlanError, match="tp is at least 1, but got tp=0"):
        Candidate(tp=0)


def test_fix_is_read_by_the_kind_of_each_knob():
    text = "tp=2, pp=4,schedule=GPipe,sequence_parallel=yes,zero=2"
    assert parse_fix(text) == {
        "tp": 2,
        "pp": 4,
        "schedule": "GPipe",
        "sequence_parallel": True,
        "zero": 2,
    }
    assert parse_fix("recompute_blocks=0,blocks_per_group=2") == {
        "recompute_blocks": 0,
        "blocks_per_group": 2,
    }
    assert parse_fix("codec=top_k:0.01,0.9,dp_replicate=4") == {
        "codec": "top_k:0.01,0.9",
        "dp_replicate": 4,
    }
    assert parse_fix("") == {}


@pytest.mark.parametrize(
    "text, said",
    [
        ("tp", "takes knob=value pairs, as in tp=2,pp=2; got 'tp'"),
        ("tp=", "takes knob=value pairs"),
        ("codec=int8,tp", "takes knob=value pairs, as in tp=2,pp=2; got 'tp'"),
        ("tpp=2", "there is no knob 'tpp'; did you mean 'tp'"),
        ("tp=2,tp=4", "names tp twice"),
        ("mesh_order=pp/tq", "as in dp_shard/pp/tp, of pp, dp_replicate"),
        ("mesh_order=pp/tp/pp", "names axes once each"),
        ("buckets=3", "pin bucket_bytes"),
        ("tp=two", "tp is a whole number, but got 'two'"),
        ("tp=-1", "tp is at least 1, but got '-1'"),
        ("sequence_parallel=2", "sequence_parallel is true or false, but got '2'"),
    ],
)
def test_what_fix_refuses(text, said):
    with pytest.raises(PlanError) as caught:
        parse_fix(text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("degrees", "acts"),
    [
        ({"dp_replicate": 2}, True),
        ({"dp_replicate": 2, "tp": 2}, True),
        ({"dp_shard": 2}, False),
        ({"dp_replicate": 2, "pp": 2}, False),
        ({"dp_replicate": 2, "dp_shard": 2}, False),
    ],
)
def test_buckets_act_where_replicas_meet_during_backward(degrees, acts):
    assert Candidate(**degrees).reduces_in_backward is acts


def test_short_names_what_is_not_neutral():
    assert Candidate().short() == "one device, microbatch 1"
    split = Candidate(pp=2, dp_shard=4, zero=1, recompute="full")
    assert split.short() == "pp=2, dp_shard=4, 1F1B, zero 1, recompute full, microbatch 1"


def test_contexts_share_the_shards_and_experts_are_at_least_one():
    split = Candidate(dp_shard=4, cp=2, ep=4, etp=2)
    assert (split.shard_ranks, split.dp, split.num_devices) == (8, 4, 8)
    assert split.short().startswith("dp_shard=4, cp=2, ep=4")
    with pytest.raises(PlanError, match="ep is at least 1, but got ep=0"):
        Candidate(ep=0)


@pytest.mark.parametrize(("recompute", "blocks", "again"), [
    ("none", 0, 0), ("full", 0, 4), ("full", 3, 3), ("half", 9, 4),
])  # fmt: skip
def test_how_many_blocks_of_a_stage_run_again(recompute, blocks, again):
    assert Candidate(recompute=recompute, recompute_blocks=blocks).recomputed(4) == again


def test_short_names_the_finer_knobs():
    split = Candidate(
        dp_shard=4, recompute="full", recompute_blocks=2, reshard_ranks=2, blocks_per_group=3
    )
    assert split.short() == (
        "dp_shard=4, zero 3, resharded over 2, 3 blocks gathered together, "
        "recompute full of 2 blocks, microbatch 1"
    )


def test_counts_that_may_be_nothing():
    for knob in ("recompute_blocks", "reshard_ranks"):
        with pytest.raises(PlanError, match=f"{knob} is at least 0, but got {knob}=-1"):
            Candidate(**{knob: -1})
    with pytest.raises(PlanError, match="blocks_per_group is at least 1, but got"):
        Candidate(blocks_per_group=0)


def test_axes_that_a_pinned_order_leaves_out_are_the_slowest():
    order = parse_fix("mesh_order=dp_shard/pp/tp")["mesh_order"]
    assert order == ("dp_replicate", "cp", "dp_shard", "pp", "tp")


def test_what_is_not_usual_is_said():
    odd = Candidate(
        pp=2, dp_replicate=2, collective="ring", codec="one_bit", bucket_bytes=5_000_000,
        mesh_order=("dp_replicate", "dp_shard", "cp", "pp", "tp"),
    )  # fmt: skip
    assert odd.short().endswith(
        "microbatch 1, buckets of 5 MB, all-reduce by ring, exchanged as one_bit, "
        "mesh dp_replicate/pp"
    )
