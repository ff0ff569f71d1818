"""Sizes and small facts of published rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.published_facts import dimensions_of, facts_of
from claw_plan.profiles.published_fields import Fields, Row
from claw_plan.profiles.published_plan import Assumptions
from claw_plan.profiles.training_row import Dimensions

Rows = Callable[..., dict[str, Any]]


def fields(values: dict[str, Any]) -> Fields:
    return Fields(Row(Path("none.csv"), (1,), "run-1"), values)


def read(values: dict[str, Any]) -> tuple[Dimensions, list[str]]:
    assumed = Assumptions()
    return dimensions_of(fields(values).part("model"), assumed), assumed.texts


def test_a_llama(row: Rows) -> None:
    sizes, assumed = read(row())
    assert (sizes.activation, sizes.norm, sizes.head_dim) == ("swiglu", "rms", 128)
    assert not sizes.learned_positions
    assert assumed == []


def test_a_gpt_with_what_its_source_leaves_out(row: Rows) -> None:
    model = {"gated_mlp": False, "ffn": None, "vocab": None, "tied_embeddings": None}
    sizes, assumed = read(row(model=model))
    assert (sizes.activation, sizes.norm, sizes.tied) == ("gelu", "layer", True)
    assert sizes.learned_positions
    assert (sizes.ffn, sizes.vocab) == (16384, 51200)
    assert len(assumed) == 2


def test_squared_relu_is_not_gated_and_has_rotary_positions(row: Rows) -> None:
    sizes, _ = read(row(model={"gated_mlp": False, "activation": "squared-relu"}))
    assert (sizes.activation, sizes.learned_positions) == ("squared-relu", False)


def test_experts_without_a_dense_layer(row: Rows) -> None:
    moe = {"experts": 128, "topk": 8, "expert_ffn": 768, "dense_ffn": None}
    sizes, _ = read(row(model={"moe": moe, "ffn": None}))
    assert sizes.moe is not None
    assert (sizes.ffn, sizes.moe.shared_ffn, sizes.moe.dense_layers) == (0, 0, 0)


@pytest.mark.parametrize(("words", "layers"), [("alternate", 16), (4, 4), (None, 32)])
def test_windows(row: Rows, words: object, layers: int) -> None:
    model = {"sliding_window": 128, "sliding_window_layers": words}
    assert read(row(model=model))[0].sliding_window_layers == layers


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"heads": 48}, r"model\.heads must divide hidden 4096; got 48"),
        ({"hidden": None}, r"model\.hidden is missing"),
        ({"moe": {"experts": 4, "topk": 8, "expert_ffn": 8}}, r"moe\.topk must be at most"),
    ],
)
def test_impossible_sizes(row: Rows, model: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(row(model=model))


@pytest.mark.parametrize(
    ("notes", "precision", "key", "fact"),
    [
        ("router force-balanced; 26.04 NeMo Container", "bf16", "release", "26.04"),
        ("router force-balanced; tokendrop", "bf16", "routing", "capacity"),
        ("router force-balanced", "bf16", "routing", "balanced"),
        ("w/ MTP", "bf16", "mtp", "yes"),
        ("w/o MTP", "bf16", "mtp", ""),
        ("", "bf16 pure (params+grads+optim bf16)", "states", "bfloat16"),
        ("no TP comm overlap in v3.0", "bf16", "tp_overlap", "none"),
        ("fp32 grad accumulation; cross-entropy fusion", "bf16", "loss", "fused"),
        ("fp32 grad accumulation; cross-entropy fusion", "bf16", "gradients", "float32"),
        ("HybridEP; activation offload on", "bf16", "offload", "activations"),
    ],
)
def test_facts(row: Rows, notes: str, precision: str, key: str, fact: str) -> None:
    values = row(notes=notes, plan={"precision": precision})
    assert facts_of(fields(values)).get(key, "") == fact
