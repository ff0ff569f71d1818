"""Printed plans; expected values from the sources' own descriptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.profiles.published_fields import Fields, Row
from claw_plan.profiles.published_plan import (
    Assumptions,
    layers_per_stage,
    plan_of,
    precision_of,
)
from claw_plan.profiles.training_row import Dimensions, MixtureOfExperts, PublishedPlan

EXPERTS = MixtureOfExperts(experts=128, topk=8, expert_ffn=1536)


def sizes(layers: int = 32, moe: MixtureOfExperts | None = None) -> Dimensions:
    return Dimensions(
        layers=layers,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffn=14336,
        vocab=32000,
        seq_len=4096,
        moe=moe,
    )


def fields(**plan: Any) -> Fields:
    return Fields(Row(Path("none.csv"), (1,), "run-1"), plan, "plan.")


def read(
    trainer: str = "torch", layers: int = 32, moe: MixtureOfExperts | None = None, **plan: Any
) -> tuple[PublishedPlan, list[str]]:
    assumed = Assumptions()
    values = {"dp": 16, "global_batch": 512, "micro_batch": 1, "recompute": "none"} | plan
    values = {key: value for key, value in values.items() if value is not None}
    plan_read = plan_of(fields(**values), sizes(layers, moe), trainer, "", assumed)
    return plan_read, assumed.texts


@pytest.mark.parametrize(
    ("text", "kind", "group", "reshard"),
    [
        ("fsdp_full_shard (ZeRO-3)", "zero3", 0, True),
        ("fsdp_shard_grad_op (ZeRO-2)", "zero2", 0, False),
        ("fsdp2 over dp*cp", "zero3", 0, True),
        ("megatron-fsdp (group 8)", "zero3", 8, True),
        ("ZeRO-1 (distributed optimizer)", "zero1", 0, True),
        ("fsdp full shard within groups of 4 (replicated x4)", "zero3", 4, True),
        ("none (DDP)", "none", 0, True),
        ("ZeRO-3 (DeepSpeed)", "zero3", 0, True),
        (
            "FSDP, optimizer+gradients sharded, no reshard after forward (ZeRO-2)",
            *("zero2", 0, False),
        ),
        ("ZeRO-1 over 8 ranks", "zero1", 8, True),
        ("ZeRO-1 over 16 ranks", "zero1", 0, True),
        ("fsdp 8", "zero3", 8, True),
        ("HSDP", "zero3", 0, True),
        ("fsdp + ZeRO-1 over all dp", "zero3", 0, True),
    ],
)
def test_sharding(text: str, kind: str, group: int, reshard: bool) -> None:
    plan, assumed = read(sharding=text)
    assert (plan.sharding, plan.shard_group, plan.reshard) == (kind, group, reshard)
    assert assumed == []


def test_missing_sharding_is_the_trainers() -> None:
    assert read("megatron-core")[0].sharding == "zero1"
    plan, assumed = read("torch")
    assert plan.sharding == "zero3"
    assert assumed == ["sharding not printed: zero3"]


@pytest.mark.parametrize(
    ("text", "trainer", "kind"),
    [
        ("full", "torch", "full"),
        ("none", "torch", "none"),
        ("selective", "megatron-2021", "attention"),
        ("selective", "torchtitan", "half"),
        ("selective (core attention)", "megatron-core", "attention"),
        ("selective (layernorm, moe)", "megatron-core", "moe"),
        ("minimal_flash", "maxtext", "half"),
        (None, "maxtext", "half"),
        (None, "megatron-core", "none"),
    ],
)
def test_recompute(text: str | None, trainer: str, kind: str) -> None:
    plan, assumed = read(trainer, recompute=text)
    assert plan.recompute == kind
    assert any("recompute not printed" in one for one in assumed) == (text is None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bf16 autocast", ("bfloat16", "", "")),
        ("fp16 mixed", ("float16", "", "")),
        ("fp32 (TF32 off for matmul)", ("float32", "", "")),
        ("mxfp8", ("bfloat16", "float8", "block")),
        ("nvfp4", ("bfloat16", "float4", "block")),
        ("fp8 rowwise linears", ("bfloat16", "float8", "row")),
        ("fp8 hybrid (TE)", ("bfloat16", "float8", "tensor")),
        ("16-bit mixed (exact type not recorded)", ("bfloat16", "", "")),
    ],
)
def test_precision(text: str, expected: tuple[str, str, str]) -> None:
    assert precision_of(text) == expected


def test_a_local_batch_is_split_over_the_stages() -> None:
    plan, assumed = read("torchtitan", dp=8, pp=8, micro_batch=None, local_batch=32, vpp=1)
    assert plan.micro_batch == 4
    assert "micro-batch not printed: local batch / pp = 4" in assumed


def test_virtual_stages_divide_the_layers_of_a_rank() -> None:
    plan, assumed = read("megatron-2021", layers=80, pp=8, schedule="interleaved 1f1b")
    assert plan.vpp == 2  # 10 layers a rank: 3 does not divide them
    assert "virtual stages not printed: 2" in assumed


def test_experts_are_whole_unless_the_source_divides_them() -> None:
    assert read("megatron-core", moe=EXPERTS, dp=16, tp=2, ep=8)[0].etp == 1
    assert read("megatron-core", moe=EXPERTS, dp=16, tp=2, ep=8, etp=2)[0].etp == 2


def test_embedding_and_head_count_as_layers_where_that_divides() -> None:
    assert layers_per_stage(fields(), 126, 8, 1) == (15, 16, 16, 16, 16, 16, 16, 15)
    assert layers_per_stage(fields(), 94, 4, 2) == (11, *[12] * 6, 11)


def test_printed_cuts_count_three_units_before_the_layers() -> None:
    cuts = fields(pipeline_cuts="[0, 6, 9, 12, 15, 18, 21, 24, 30]")
    assert layers_per_stage(cuts, 24, 8, 1) == (3,) * 8
    assert layers_per_stage(fields(pipeline_cuts=[0, 14, 30]), 24, 2, 1) == (11, 13)


def test_a_ceil_split_puts_more_layers_first() -> None:
    partition = fields(pp_partition="transformer layers (ceil split)")
    assert layers_per_stage(partition, 78, 12, 1) == (7,) * 6 + (6,) * 6


@given(st.integers(1, 200), st.integers(1, 16), st.integers(1, 4))
def test_stages_hold_all_layers(layers: int, pp: int, vpp: int) -> None:
    stages = layers_per_stage(fields(), layers, pp, vpp)
    assert not stages or (sum(stages) == layers and len(stages) == pp * vpp)
    assert not stages or max(stages) - min(stages) <= 1


def test_microbatches_without_equal_rounds_are_simulated_without_virtual_stages() -> None:
    plan, assumed = read(dp=4, pp=4, vpp=2, global_batch=17 * 4)
    assert plan.vpp == 1
    assert assumed[0].startswith("17 microbatches make no equal rounds over 4 stages")
    assert read(dp=4, pp=4, vpp=2, global_batch=16 * 4)[0].vpp == 2
    assert read(dp=4, pp=4, vpp=2, global_batch=3 * 4)[0].vpp == 2  # one round of three


def test_one_stage_has_no_virtual_ones() -> None:
    assert read(vpp=4)[0].vpp == 1


def test_tensor_parallelism_divides_the_sequence_where_the_trainer_does() -> None:
    for trainer, divides in (("torch", True), ("megatron-core", True), ("megatron-2022", False)):
        plan, assumed = read(trainer, tp=8)
        assert plan.sequence_parallel is divides
        assert f"sequence parallelism not printed: {'on' if divides else 'off'}" in assumed
    assert read("megatron-2022", tp=8, sequence_parallel=True)[0].sequence_parallel
