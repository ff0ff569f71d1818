"""A traced model's rules for experts name the structures of its blocks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from claw_plan.planner.model_source import load_model
from claw_plan.planner.trace import trace

MIXTURE = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 61,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 16,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "qk_nope_head_dim": 8, "n_routed_experts": 8, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.slow
def test_dense_blocks_and_mixtures_are_told_apart(tmp_path: Path) -> None:
    """16 tokens a sample with 2 of 8 experts each; the first block is dense."""
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTURE))
    graph = trace(load_model(path), seq_len=16, dtype="float32")
    [rule] = graph.expert_parallel
    assert (rule.module, rule.experts, rule.rows_per_sample) == ("mlp.experts", 8, 32)
    assert (rule.inner, rule.weight_dims) == (16, (("gate_up_proj", 1), ("down_proj", 2)))
    dense, *mixtures = graph.blocks
    assert {block.structure for block in mixtures} == set(rule.structures)
    assert dense.structure not in rule.structures
    assert (graph.ep_divides, graph.no_expert_parallel) == (8, "")
    divided = {p.name.rpartition(".")[2]: p.tp_dim for p in graph.parameters if p.tp_dim}
    assert divided["gate_up_proj"] == 1
    assert divided["down_proj"] == 2
