"""Rates to step times; expected values by hand, and where possible from the sources' tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from claw_plan.profiles import catalogue
from claw_plan.profiles.published_fields import Fields, Row
from claw_plan.profiles.published_figures import (
    Memory,
    Run,
    active_parameters,
    attention_flops_per_token,
    memories,
    out_of_memory,
    step_time_ns,
)
from claw_plan.profiles.training_row import Dimensions, LatentAttention, MixtureOfExperts
from claw_plan.profiles.units import s_from_ns

NONE = Fields(Row(Path("none.csv"), (1,), "run-1"), {})
GPT_175B = Dimensions(
    layers=96,
    hidden=12288,
    heads=96,
    kv_heads=96,
    head_dim=128,
    ffn=49152,
    vocab=51200,
    seq_len=2048,
)
DEEPSEEK_V3 = Dimensions(
    layers=61,
    hidden=7168,
    heads=128,
    kv_heads=128,
    head_dim=192,
    ffn=18432,
    vocab=129280,
    seq_len=4096,
    activation="swiglu",
    moe=MixtureOfExperts(
        experts=256, topk=8, expert_ffn=2048, shared_ffn=2048, dense_layers=3, dense_ffn=18432
    ),
    mla=LatentAttention(
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_dim=128, qk_rope_dim=64, v_head_dim=128
    ),
)


def measured(**values: Any) -> Fields:
    return Fields(NONE.row, values, "measured.")


def run(count: int = 384, batch: int = 1536, trainer: str = "") -> Run:
    device = catalogue.device("a100-sxm-80gb")
    return Run(sizes=GPT_175B, device=device, count=count, global_batch=batch, trainer=trainer)


def test_parameters_as_their_makers_say() -> None:
    # DeepSeek-V3's report: 37 B active of 671 B; with the head and without the table 36.6 B.
    assert active_parameters(DEEPSEEK_V3) == pytest.approx(37e9, rel=0.02)
    assert active_parameters(GPT_175B) == pytest.approx(175e9, rel=0.01)


@pytest.mark.parametrize(
    ("values", "seconds"),
    [
        ({"step_time_s": 2.5}, 2.5),
        ({"tokens_per_s_per_gpu": 2048.0}, 1536 * 2048 / 384 / 2048),
        ({"tokens_per_s": 1536 * 2048.0}, 1.0),
        ({"samples_per_s": 768.0}, 2.0),
    ],
)
def test_times_and_rates(values: dict[str, Any], seconds: float) -> None:
    time_ns, note = step_time_ns(measured(**values), NONE, run())
    assert time_ns is not None
    assert s_from_ns(time_ns) == pytest.approx(seconds)
    assert note == ""


def test_a_time_derived_by_the_file_is_taken() -> None:
    time_ns, _ = step_time_ns(measured(mfu=0.5), measured(step_time_s=3.0), run())
    assert time_ns == 3_000_000_000


def test_the_rate_of_sc21_is_its_formula() -> None:
    # Table 2 of the paper: 384 GPUs, batch 1536, 153 TFLOP/s a GPU, 84 days for 300 B tokens.
    definition = "SC21-hardware: F=96*B*s*l*h^2*(1+s/6h+V/16lh), full recompute included"
    values = measured(tflops_per_gpu=153.0, flops_definition=definition)
    time_ns, note = step_time_ns(values, NONE, run())
    assert time_ns is not None
    days = s_from_ns(time_ns) * 300e9 / (1536 * 2048) / 86400
    assert days == pytest.approx(84, rel=0.02)
    assert "Megatron" in note


def test_a_utilisation_of_megatron_without_a_definition_is_its_formula() -> None:
    time_ns, _ = step_time_ns(measured(mfu=0.5), NONE, run(trainer="megatron-2021"))
    flops = 72 * 1536 * 96 * 2048 * 12288**2 * (1 + 1 / 36 + 51200 / (12 * 12288 * 96))
    assert time_ns is not None
    assert s_from_ns(time_ns) == pytest.approx(flops / (0.5 * 312e12 * 384))


def test_attention_counts_the_causal_half_unless_the_source_counts_all() -> None:
    assert attention_flops_per_token(GPT_175B) == 6 * 96 * 2048 * 12288
    assert attention_flops_per_token(GPT_175B, causal=False) == 12 * 96 * 2048 * 12288
    _, half = step_time_ns(measured(tflops_per_gpu=100.0), NONE, run())
    text = "model: 3*(2*N*tokens + 4*L*d*s^2 non-causal attention)/bf16 peak"
    _, whole = step_time_ns(measured(mfu=0.4, flops_definition=text), NONE, run())
    assert "causal half" in half
    assert "whole attention" in whole


def test_windows_limit_what_attention_sees() -> None:
    windowed = Dimensions(
        layers=2,
        hidden=64,
        heads=1,
        kv_heads=1,
        head_dim=64,
        ffn=256,
        vocab=10,
        seq_len=1000,
        sliding_window=100,
        sliding_window_layers=1,
    )
    assert attention_flops_per_token(windowed, causal=False) == 12 * 64 * (1000 + 100)


def test_no_figure() -> None:
    assert step_time_ns(measured(failed=True), NONE, run()) == (None, "")


@pytest.mark.parametrize(
    ("trainer", "values", "expected"),
    [
        ("torchtitan", {"memory_gib": 2.0}, [Memory(bytes=2 << 30, kind="reserved")]),
        ("simumax", {"memory_gib": 1.0}, [Memory(bytes=1 << 30, kind="allocated")]),
        ("bigscience", {"memory_gb": 1}, [Memory(bytes=10**9, kind="nvidia-smi")]),
        ("torch", {"memory_gb": 1}, [Memory(bytes=10**9, kind="nvidia-smi")]),
        (
            "megatron-2021",
            {"memory_params_optimizer_gib": 1.0, "memory_activations_gib": 2.0},
            [Memory(bytes=2 << 30, kind="activations"), Memory(bytes=1 << 30, kind="states")],
        ),
    ],
)
def test_memory(trainer: str, values: dict[str, Any], expected: list[Memory]) -> None:
    assert memories(measured(**values), trainer) == expected


def test_verdicts() -> None:
    assert out_of_memory(measured(oom=True)) is True
    assert out_of_memory(measured(fits_80gib=True)) is False
    assert out_of_memory(measured()) is None
