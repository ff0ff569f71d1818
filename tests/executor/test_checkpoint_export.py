"""Weights in one file: for `load_state_dict`, for `from_pretrained`, and back with --init-from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from claw_plan.executor.checkpoint import Checkpointer
from claw_plan.executor.checkpoint_export import export_weights, whole_weights
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import compile_plan
from claw_plan.executor.ranks import Rank


@pytest.fixture
def checkpoint(config_plan: Callable[..., Path], alone: Rank, tmp_path: Path) -> Path:
    """Of an untouched GPT-2 whose head is tied to its table."""
    opened = open_plan(config_plan("gpt2", "exported"))
    compiled = compile_plan(opened[0], opened[1], alone.device)
    with torch.no_grad():
        for parameter in compiled.parameters.values():
            parameter.add_(0.5)
    checkpointer = Checkpointer(compiled, tmp_path / "c")
    checkpointer.save(1)
    assert checkpointer.finish() == ""
    return tmp_path / "c" / "step-00000001"


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
def test_a_model_of_ones_own_takes_every_key(
    name: str, checkpoint: Path, config_plan: Callable[..., Path], tmp_path: Path
) -> None:
    file = export_weights(checkpoint, tmp_path / name)
    held = torch.load(file) if name.endswith(".pt") else load_file(file)
    model = open_plan(config_plan("gpt2", "exported"))[1].build()
    model.load_state_dict(held)
    built = open_plan(config_plan("gpt2", "exported"))[1].build()
    assert set(held) == set(built.state_dict())
    assert torch.equal(held["lm_head.weight"], held["transformer.wte.weight"])
    assert [path.name for path in tmp_path.glob(".*partial")] == []
    assert {k: v.dtype for k, v in whole_weights(checkpoint).items()} == {
        k: torch.float32 for k in held
    }


def test_transformers_reads_the_folder(
    checkpoint: Path, config_plan: Callable[..., Path], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    loaded = open_plan(config_plan("gpt2", "exported"))[1]
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(json.loads(loaded.path.read_text())))
    assert export_weights(checkpoint, folder) == folder / "model.safetensors"
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    weights = whole_weights(checkpoint)
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name
