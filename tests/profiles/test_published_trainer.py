"""Software of published runs; what each publisher runs stands in its own page."""

from __future__ import annotations

import pytest

from claw_plan.profiles.published_trainer import release_of, trainer_of

BRIDGE = {
    "title": "NVIDIA Megatron-Bridge performance summary",
    "table": "26.06.01 NeMo Container / DeepSeekV3 / DGX-GB300",
    "notes": "router force-balanced; 26.06.01 NeMo Container",
}


@pytest.mark.parametrize(
    ("family", "facts", "trainer"),
    [
        ("mosaicml", {}, "llm-foundry"),
        ("torchtitan", {}, "torchtitan"),
        ("nvidia-megatron", BRIDGE, "megatron-core-26"),
        ("nvidia-megatron", BRIDGE | {"table": "26.04 NeMo Container / X"}, "megatron-core"),
        ("nvidia-megatron", {"group": "dgxc|Llama2-70B MaxText|bf16"}, "maxtext"),
        ("nvidia-jax", {"title": "JAX-Toolbox MaxText notes"}, "maxtext"),
        ("megatron-paper", {"sharding": "ZeRO-3 (DeepSpeed)"}, "deepspeed-zero3"),
        ("megatron-paper", {"sharding": "none (DDP)"}, "megatron-2021"),
        ("megatron-paper", {"where": "arXiv 2205.05198"}, "megatron-2022"),
        ("megascale", {"notes": "baseline Megatron-LM"}, "megatron-2021"),
        ("megascale", {"notes": "parallel transformer block"}, "megascale"),
        ("somebody", {"title": "our torchtitan runs"}, "torchtitan"),
        ("somebody", {"where": "github microsoft/Megatron-DeepSpeed"}, "bigscience"),
        ("somebody", {"title": "Megatron-LM on our cluster"}, "megatron-core"),
        ("somebody", {}, "torch"),
    ],
)
def test_trainers(family: str, facts: dict[str, str], trainer: str) -> None:
    assert trainer_of(family, facts) == trainer


def test_releases() -> None:
    assert release_of(BRIDGE) == (26, 6)
    assert release_of({"notes": "25.11 NeMo Container"}) == (25, 11)
    assert release_of({"table": "26.06 / no such word"}) == (0, 0)
