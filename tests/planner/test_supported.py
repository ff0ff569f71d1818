"""What may be offered, and that each composition names a proof that exists."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.errors import PlanError
from claw_plan.planner.supported import (
    ALGORITHMS,
    CODECS,
    COMPOSITIONS,
    can_grow_from,
    codecs_named,
    nodes_refusal,
    proof,
    refusal,
)
from claw_plan.profiles.codecs import CODEC_NAMES
from claw_plan.profiles.collective_schedules import ALGORITHMS as KNOWN_ALGORITHMS

ROOT = Path(__file__).parents[2]

CP_APART = ("cp", "pp", "dp_replicate", "dp_shard", "tp")
SHARDS_FIRST = ("dp_shard", "dp_replicate", "pp", "cp", "tp")


@pytest.mark.parametrize(
    "change, said",
    [
        ({"cp_comm_type": "ring"}, "cp_comm_type=ring: use one of all_gather, a2a"),
        ({"cp": 2, "tp": 2}, "cp x tp: no test proves"),
        ({"cp": 2, "dp_shard": 4, "reshard_ranks": 2}, "is not proven with cp; use 0"),
        ({"cp": 2, "mesh_order": CP_APART}, "cp shares the states of dp_shard and comes right"),
        ({"cp": 2, "dp_replicate": 2, "codec": "one_bit"}, "codec=one_bit: it acts where whole"),
        ({"codec": "int8"}, "use dp_replicate, dp_shard or cp above 1"),
        ({"ep": 2}, "ep divides dp_shard, or is a multiple of it that divides dp"),
        ({"ep": 4, "dp_shard": 6, "dp_replicate": 4}, "here dp_replicate=4, dp_shard=6"),
        ({"ep": 2, "dp_shard": 2, "tp": 2}, "leave etp out, it is 2 at ep=2 and tp=2"),
        ({"etp": 2, "dp_shard": 2}, "leave etp out, it is 1 at ep=1"),
        ({"ep": 2, "dp_shard": 4, "blocks_per_group": 2}, "with blocks_per_group=2 is not proven"),
        ({"zero": 2, "pp": 2, "dp_shard": 2}, "reduced once a step; use zero=1"),
        ({"offload": "params"}, "use one of none, optimizer"),
        ({"codec": "int9"}, "codec=int9: there is no codec 'int9'"),
        ({"codec": "low_rank", "dp_replicate": 2, "tp": 2}, "not proven with tensor parallelism"),
        (
            {"codec": "one_bit", "collective": "ring", "dp_replicate": 2, "tp": 2},
            "collective=ring is not proven with tensor parallelism; use tp=1, or collective=auto",
        ),
        ({"codec": "one_bit", "dp_shard": 2}, "use dp_replicate above 1, dp_shard=1 and pp=1"),
        (
            {"codec": "int8", "dp_replicate": 4, "collective": "tree"},
            "ring, halving_doubling, hier",
        ),
        ({"codec": "int8", "dp_replicate": 6, "collective": "halving_doubling"}, "a power of two"),
        ({"codec": "int8", "dp_shard": 2, "collective": "ring"}, "collective=ring: it acts where"),
        ({"collective": "star"}, "use one of auto"),
        ({"collective": "ring", "dp_replicate": 2, "pp": 2}, "whole replicas meet during"),
        ({"schedule": "ZBVZeroBubble"}, "schedule=ZBVZeroBubble runs with 2"),
        ({"recompute": "selective"}, "use one of none, full, half"),
        ({"recompute_blocks": 2}, "nothing is run again; use recompute=full"),
        ({"blocks_per_group": 2}, "only shards are gathered; use dp_shard above 1"),
        ({"reshard_ranks": 2, "dp_shard": 4, "zero": 2}, "nothing is freed after forward"),
        ({"reshard_ranks": 4, "dp_shard": 4}, "dp_shard=4 must be a multiple of it, and larger"),
        ({"reshard_ranks": 1, "dp_shard": 4}, "zero=2 keeps parameters whole"),
        ({"reshard_ranks": 4, "dp_shard": 6}, "dp_shard=6 must be a multiple of it"),
        ({"reshard_ranks": 2}, "dp_shard=1 must be a multiple of it"),
        ({"pp": 2, "tp": 2, "dp_shard": 2, "dp_replicate": 2}, "no test proves"),
        ({"dp_shard": 2, "dp_replicate": 2, "mesh_order": SHARDS_FIRST}, "a mesh of replicas of"),
    ],
)
def test_refused_with_a_reason(change, said):
    assert said in refusal(replace(Candidate(), **change))


def test_codes_travel_between_nodes_of_several_replicas_each():
    coded = Candidate(dp_replicate=4, codec="int8", collective="hierarchical")
    assert refusal(coded) == nodes_refusal(coded, 2) == ""
    assert "nothing would be encoded; use collective=ring" in nodes_refusal(coded, 1)
    assert "where codes travel as by ring" in nodes_refusal(coded, 4)
    for numbers in (replace(coded, codec="none"), replace(coded, codec="low_rank:2")):
        assert not any(nodes_refusal(numbers, nodes) for nodes in (1, 2, 4))


def test_offered():
    assert refusal(Candidate(cp=2, codec="int8")) == ""
    assert refusal(Candidate(dp_replicate=2, tp=2, codec="one_bit")) == ""
    assert refusal(Candidate(dp_replicate=8, codec="one_bit", collective="halving_doubling")) == ""
    assert refusal(Candidate(pp=2, tp=2, dp_shard=2, schedule="GPipe")) == ""
    assert refusal(Candidate(dp_shard=4, reshard_ranks=2, blocks_per_group=3)) == ""
    assert refusal(Candidate(recompute="half", recompute_blocks=3)) == ""
    assert refusal(Candidate(dp_shard=4, pp=2, mesh_order=SHARDS_FIRST)) == ""
    assert refusal(Candidate(cp=2, dp_shard=4, blocks_per_group=2, cp_comm_type="a2a")) == ""
    assert refusal(Candidate(cp=2, blocks_per_group=2)) == ""
    assert can_grow_from(Candidate(pp=2, tp=2))


def test_every_proof_is_a_case_of_the_parity_test():
    for composition in COMPOSITIONS:
        file, _, case = composition.proven_by.partition("::")
        text = (ROOT / file).read_text()
        assert re.search(rf"\b{case}\b", text), composition.proven_by
    assert proof(Candidate(tp=2)).endswith("::tp")


def test_codecs_named_on_the_command_line():
    assert codecs_named("one_bit, top_k:0.001") == ("one_bit", "top_k:0.001")
    assert codecs_named("fp8:e5m2,128,int8") == ("fp8:e5m2,128", "int8")
    assert set(codecs_named("all")) == {
        "one_bit", "top_k", "fp16", "fp8", "int8", "int4", "low_rank", "zero_one",
    }  # fmt: skip
    assert codecs_named("all,threshold:0.1,int8") == (*codecs_named("all"), "threshold:0.1")
    with pytest.raises(PlanError, match="--codecs codec=int9"):
        codecs_named("int9")


def test_every_codec_and_algorithm_names_a_test_that_exists():
    for proven_by in {*CODECS.values(), *ALGORITHMS.values()}:
        file, _, case = proven_by.partition("::")
        assert f"def {case}(" in (ROOT / file).read_text(), proven_by
    assert set(ALGORITHMS) == set(KNOWN_ALGORITHMS)
    assert {"none", *CODECS} == set(CODEC_NAMES)
