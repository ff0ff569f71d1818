"""Which codecs, algorithms and bucket sizes are offered, and where."""

from __future__ import annotations

from dataclasses import replace

import pytest

from claw_plan.planner.averaging_choices import AveragingChoices, training_refusal
from claw_plan.planner.space import Space
from claw_plan.planner.supported import refusal
from claw_plan.profiles.trainers import load_trainers

NAMED = ("one_bit", "int8")


def encoded(problem, fix=None, named=NAMED):
    space = Space(problem, fix or {}, named)
    found = [candidate for group in space.groups() for candidate in space.members(group)]
    assert len(found) == sum(group.size for group in space.groups())
    assert not [candidate for candidate in found if refusal(candidate)]
    return [candidate for candidate in found if candidate.codec != "none"]


def with_training(problem, **changed):
    return replace(problem, training=replace(problem.training, **changed))


def test_codecs_are_offered_where_they_are_named_and_act(toys):
    """Those of momentum where whole replicas meet in backward, in fp32, and not with a clip."""
    problem = toys.problem(toys.graph(layers=3), toys.cluster(devices=2), global_batch=2)
    assert encoded(problem, named=()) == []
    assert {(c.codec, c.reduces_in_backward, c.offload) for c in encoded(problem)} == {
        ("one_bit", True, "none"), ("int8", True, "none"), ("int8", True, "optimizer"),
        ("int8", False, "none"),
    }  # fmt: skip
    pinned = encoded(problem, {"codec": "top_k:0.01"})
    assert {(c.codec, c.dp_replicate) for c in pinned} == {("top_k:0.01", 2)}
    mixed = encoded(with_training(problem, precision="bfloat16"))
    assert {c.codec for c in mixed} == {"int8"}
    assert {c.codec for c in encoded(with_training(problem, clip_norm=1.0))} == {"int8"}


def test_gradients_are_encoded_wherever_they_are_averaged(toys):
    """Every way of having data parallelism on four devices, and none without it."""
    problem = toys.problem(toys.graph(layers=4), toys.cluster(devices=4), global_batch=4)
    ways = {
        (c.pp > 1, c.tp > 1, c.dp_replicate > 1, c.dp_shard > 1, c.zero) for c in encoded(problem)
    }
    assert {(pp, tp) for pp, tp, *_ in ways} == {(False, False), (False, True), (True, False)}
    assert {(a, b) for *_, a, b, _ in ways} == {(True, False), (False, True), (True, True)}
    assert {zero for *_, shards, zero in ways if shards} == {1, 2, 3}
    assert all(c.offload == "none" for c in encoded(problem) if not c.reduces_in_backward)


def test_none_is_offered_in_float16_or_to_a_trainer_that_knows_none(toys):
    problem = toys.problem(toys.graph(layers=3), toys.cluster(devices=2), global_batch=2)
    assert encoded(with_training(problem, precision="float16")) == []
    megatron = replace(problem, trainer=load_trainers()["megatron-core"])
    assert encoded(megatron) == []


def test_other_knobs_do_not_grow_with_codecs(toys):
    """Where codecs travel at the end of a step nothing but the codec differs."""
    problem = toys.problem(toys.graph(layers=3), toys.cluster(devices=2), global_batch=2)
    plain = AveragingChoices(problem, {}, ()).of(True, 1, 1, 2, "none")
    coded = AveragingChoices(problem, {}, ("fp16", "int4")).of(True, 1, 1, 2, "none")
    assert [choice["codec"] for choice in coded] == ["none", "fp16", "int4"]
    assert [choice | {"codec": "none"} for choice in coded] == 3 * plain


def test_between_nodes_codes_have_ways_of_their_own(toys):
    """NCCL sends straight what we would; that numbers are summed inside nodes first is ours."""
    graph = toys.graph(layers=3)
    on_gpus = toys.problem(graph, toys.cluster(nodes=2, devices=2), global_batch=4)
    on_cpus = toys.problem(graph, toys.cluster(nodes=2, devices=2, kind="cpu"), global_batch=4)
    whole = {"tp": 1, "pp": 1, "dp_shard": 1}
    ways = [
        {(c.dp_replicate, c.collective) for c in encoded(problem, whole)}
        for problem in (on_gpus, on_cpus)
    ]
    library = {(2, "auto"), (4, "auto")}
    assert ways[0] == library | {(4, "hierarchical")}
    assert ways[1] == ways[0] | {(4, "ring"), (4, "halving_doubling")}
    apart = toys.problem(graph, toys.cluster(nodes=4, devices=1, kind="cpu"), global_batch=4)
    assert "hierarchical" not in {c.collective for c in encoded(apart, whole)}
    pinned = {"collective": "hierarchical", "dp_replicate": 4}
    assert encoded(on_gpus, pinned) and not encoded(apart, pinned)


@pytest.mark.parametrize(
    ("codec", "collective", "changed", "said"),
    [
        ("int8", "auto", {"precision": "float16"}, "use --precision bf16 or fp32"),
        ("one_bit", "auto", {"precision": "bfloat16"}, "or one of fp16, fp8, int8, int4"),
        ("none", "ring", {"precision": "bfloat16"}, "or collective=auto"),
        ("zero_one:4", "auto", {"optimizer": "lamb"}, "--optimizer adamw, or codec=one_bit"),
        ("top_k:0.01,0.9", "auto", {}, "use --optimizer sgd, or top_k without momentum"),
        ("one_bit", "auto", {"clip_norm": 1.0}, "int4, low_rank"),
        ("low_rank:4", "ring", {"clip_norm": 1.0, "optimizer": "lamb"}, ""),
        ("int8", "auto", {"precision": "bfloat16"}, ""),
    ],
)
def test_what_training_refuses_is_told_with_a_way_out(toys, codec, collective, changed, said):
    training = toys.problem(toys.graph(layers=3), toys.cluster(devices=2)).training
    why = training_refusal(replace(training, **changed), codec, collective)
    assert why.endswith(said) and bool(why) is bool(said)
