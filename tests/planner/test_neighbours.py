"""Neighbours differ in one knob and are scored like any candidate."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from claw_plan.planner.candidate import Candidate, parse_fix
from claw_plan.planner.neighbours import Neighbour, neighbours
from claw_plan.planner.score import Scorer
from claw_plan.planner.supported import refusal

COMPENSATE = {"dp_shard", "dp_replicate", "zero"}
FORCED = {"pp": {"schedule", "stages_per_rank"}}
FORCED["tp"] = {"sequence_parallel", "pp", *FORCED["pp"]}
FORCED["schedule"] = {"stages_per_rank"}


@pytest.fixture
def scorer(toys):
    problem = toys.problem(toys.graph(layers=4), toys.cluster(nodes=2, devices=4), global_batch=16)
    return Scorer(problem)


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(dp_shard=8, microbatch_size=2),
        Candidate(pp=2, dp_replicate=2, tp=2, sequence_parallel=True),
        Candidate(pp=4, dp_shard=2, zero=1, recompute="full"),
    ],
)
def test_one_knob_changes_and_the_devices_stay(scorer, candidate):
    found = neighbours(scorer, candidate)
    assert {each.knob for each in found} >= {"tp", "pp", "microbatch_size", "recompute"}
    for each in found:
        changed = {
            field.name
            for field in fields(Candidate)
            if getattr(each.candidate, field.name) != getattr(candidate, field.name)
        }
        assert each.knob in changed
        assert changed <= {each.knob} | COMPENSATE | FORCED.get(each.knob, set()), each
        assert each.candidate.num_devices == candidate.num_devices


def test_the_score_is_that_of_the_scorer(scorer):
    for each in neighbours(scorer, Candidate(pp=2, dp_shard=4)):
        if each.refused:
            assert each.step_time_ns is None and not each.fits
            continue
        assert not refusal(each.candidate)
        cuts = scorer.bounds.stage_path(each.candidate).cuts
        assert each.step_time_ns == scorer.step_time_ns(each.candidate, cuts)


def test_what_does_not_fit_lacks_what_memory_says(toys):
    cluster = toys.cluster(devices=4, memory_bytes=9_000, kind="cpu")
    scorer = Scorer(toys.problem(toys.graph(layers=4), cluster, global_batch=16))
    short = [n for n in neighbours(scorer, Candidate(dp_replicate=4)) if n.missing_bytes]
    assert short
    for each in short:
        cuts = scorer.bounds.stage_path(each.candidate).cuts
        stages = scorer.memory.stages(each.candidate, cuts)
        assert each.missing_bytes == max(s.peak_bytes - s.capacity_bytes for s in stages)
        assert not each.fits


def test_a_batch_that_does_not_divide_is_a_reason(scorer):
    refused = {
        (n.knob, n.value): n.refused for n in neighbours(scorer, Candidate(dp_shard=8,
                                                                           microbatch_size=2))
    }  # fmt: skip
    assert "does not divide" in refused["microbatch_size", 4]


def test_where_replicas_meet_their_averages_may_change(scorer):
    found = [n for n in neighbours(scorer, Candidate(dp_replicate=4, dp_shard=1)) if n.fits]
    knobs = {each.knob for each in found}
    assert knobs >= {"collective", "codec", "bucket_bytes"}
    assert {n.value for n in found if n.knob == "codec"} == {
        "one_bit", "top_k", "fp16", "fp8", "int8", "int4", "low_rank", "zero_one",
    }  # fmt: skip
    sharded = {n.knob for n in neighbours(scorer, Candidate(dp_shard=4), timed=False)}
    assert sharded & {"collective", "codec", "bucket_bytes"} == {"codec"}


def test_codecs_and_algorithms_are_neighbours_of_each_other(scorer):
    """Eight replicas on two nodes: codes may travel between nodes alone, and not by a tree."""
    coded = Candidate(dp_replicate=8, codec="int8")
    found = {n.value: n for n in neighbours(scorer, coded, timed=False) if n.knob == "collective"}
    assert {n.candidate.codec for n in found.values()} == {"int8"}
    assert found["hierarchical"].fits and found["ring"].fits
    assert "gathered in parts" in found["tree"].refused
    on_one = replace(coded, dp_replicate=4)
    found = {n.value: n for n in neighbours(scorer, on_one, timed=False) if n.knob == "collective"}
    assert "nothing would be encoded" in found["hierarchical"].refused
    by_tree = replace(coded, codec="none", collective="tree")
    found = {n.value: n for n in neighbours(scorer, by_tree, timed=False) if n.knob == "codec"}
    assert found["int8"].candidate.collective == "auto"


def test_orders_in_which_ranks_lie_otherwise_are_neighbours(scorer):
    """On two nodes of four stages or shards cross; on one node nothing differs."""
    wide = Candidate(pp=2, dp_shard=4)
    orders = [n.value for n in neighbours(scorer, wide, timed=False) if n.knob == "mesh_order"]
    assert orders and all(order != wide.mesh_order for order in orders)
    shown = Neighbour(knob="mesh_order", value=orders[0], candidate=wide).change
    assert parse_fix(shown) == {"mesh_order": orders[0]}
    small = Candidate(pp=2, dp_shard=2)
    assert not [n for n in neighbours(scorer, small, timed=False) if n.knob == "mesh_order"]
