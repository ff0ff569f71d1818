"""The tensor-parallel split found without names is the one transformers states by names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from claw_plan.planner.model_source import load_model
from claw_plan.planner.subject import Subject
from claw_plan.planner.tensor_parallel_search import find_rules

CONFIGS = Path(__file__).parents[2] / "bench" / "published_configs.yaml"


def published(name: str) -> dict[str, Any]:
    entries = yaml.safe_load(CONFIGS.read_text(encoding="utf-8"))
    config: dict[str, Any] = next(entry["config"] for entry in entries if entry["name"] == name)
    return {**config, "num_hidden_layers": 2, "max_position_embeddings": 32}


@pytest.mark.parametrize("name", ["Llama 3 8B", "Phi-2", "GPT-NeoX 20B"])
def test_the_split_of_a_published_model_is_the_stated_one(name: str, tmp_path: Path) -> None:
    """Grouped queries with a gate; attention beside the feed-forward; fused q, k and v."""
    transformers = pytest.importorskip("transformers", reason="the models are of transformers")
    config = published(name)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = load_model(tmp_path)
    subject = Subject.prepare(model, seq_len=32, dtype=torch.bfloat16)
    batch = subject.batch(2)
    with subject.world():
        finding = find_rules(subject.module, subject.block_names, lambda: subject.forward(batch))
    split = {r.module: r.style for r in finding.rules if r.style != "region"}
    stated = transformers.CONFIG_MAPPING[config["model_type"]].base_model_tp_plan
    assert split == {
        pattern.removeprefix("layers.*."): style
        for pattern, style in stated.items()
        if pattern.startswith("layers.*.")
    }
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    assert finding.tp_divides == heads
