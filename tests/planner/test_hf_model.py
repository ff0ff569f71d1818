from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from claw_plan.planner.model_source import load_model
from claw_plan.profiles.errors import InputError

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "max_position_embeddings": 16,
    "torch_dtype": "bfloat16",
}


def write(tmp_path: Path, config: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


@pytest.mark.slow
def test_a_folder_with_a_config_is_a_language_model(tmp_path: Path) -> None:
    model = load_model(write(tmp_path, LLAMA))
    module, batch = model.build(), model.example_batch(2)
    assert type(module).__name__ == "LlamaForCausalLM"
    assert {str(p.dtype) for p in module.parameters()} == {"torch.float32"}
    assert {name: tuple(t.shape) for name, t in batch.items()} == {
        "input_ids": (2, 16),
        "labels": (2, 16),
    }
    assert model.seq_len() == 16 and not module.config.use_cache
    assert model.loss(module(**batch), batch).requires_grad


@pytest.mark.slow
def test_the_named_architecture_wins(tmp_path: Path) -> None:
    config = {**LLAMA, "architectures": ["LlamaForSequenceClassification"], "pad_token_id": 0}
    model = load_model(write(tmp_path, config))
    module, batch = model.build(), model.example_batch(3)
    assert batch["labels"].shape == (3,)
    assert model.loss(module(**batch), batch).requires_grad


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "is not JSON"),
        ("[1]", "has a key 'model_type'"),
        ('{"hidden_size": 3}', "has a key 'model_type'"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        load_model(tmp_path)


def test_build_is_for_python_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--build names an expression of a Python file"):
        load_model(write(tmp_path, LLAMA), build="x")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "lama"}, r"has no model_type 'lama'; did you mean .*'llama'"),
        ({"model_type": "my_own", "auto_map": {"AutoConfig": "x.Y"}}, "no model_type 'my_own'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 1 to 10000, but got 0"),
        ({"vocab_size": -5}, "vocab_size is 1 to 100000000, but got -5"),
        ({"num_hidden_layers": 10**9}, "is 1 to 10000, but got 1000000000"),
    ],
)
def test_configs_of_no_model(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_model(write(tmp_path, LLAMA | change))


@pytest.mark.slow
def test_a_class_that_is_not_fed_token_ids_needs_inputs(tmp_path: Path) -> None:
    config = {
        "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64,
        "image_size": 16, "patch_size": 8,
    }  # fmt: skip
    with pytest.raises(InputError, match="say what it is fed with --inputs"):
        load_model(write(tmp_path, config))
    model = load_model(tmp_path, inputs="pixel_values=float32[B,3,16,16] labels=int64[B]<2")
    module, batch = model.build(), model.example_batch(2)
    assert type(module).__name__ == "ViTForImageClassification"
    assert model.loss(module(**batch), batch).requires_grad and model.seq_len() is None
