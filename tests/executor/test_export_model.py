"""What is written down of models of several kinds, by running it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.export_model import ModelText, describe
from claw_plan.executor.opened_plan import open_plan
from claw_plan.planner.plan import Plan


def _described(path: Path) -> tuple[Plan, ModelText]:
    plan, loaded = open_plan(path)
    return plan, describe(plan, loaded, path.parent)


def test_a_file_with_a_loss_of_its_own(plain_plan: Callable[..., Path]) -> None:
    _, text = _described(plain_plan("described"))
    assert text.build == "MODEL.build_model()"
    assert text.call == 'ids=batch["ids"]'
    assert text.loss == "MODEL.loss(output, batch)"
    assert text.batch == "    return MODEL.example_batch(rows)"
    assert text.optimizer is None and not text.trains_on_file


def test_inputs_in_words_become_the_same_tensors(tiny_plan: Callable[..., Path]) -> None:
    path = tiny_plan("words")
    _, text = _described(path)
    assert (text.build, text.call) == ("eval(BUILD, vars(MODEL))", "**batch")
    assert text.loss == "output[1]"
    names: dict[str, object] = {"torch": torch}
    exec(f"def make_batch(rows):\n{text.batch}", names)
    torch.manual_seed(5)
    written = names["make_batch"](4)  # type: ignore[operator]
    torch.manual_seed(5)
    ours = open_plan(path)[1].make_batch(4, None)
    assert list(written) == list(ours)
    assert all(torch.equal(written[name], value) for name, value in ours.items())


def test_a_hugging_face_config(config_plan: Callable[..., Path]) -> None:
    _, text = _described(config_plan("llama", "described"))
    assert text.build == "transformers.LlamaForCausalLM(CONFIG)"
    assert text.loss == "output.loss"
    assert "AutoConfig.from_pretrained(MODEL_FILE)" in text.load


def test_a_shorter_sequence_is_cut_or_refused(
    plain_plan: Callable[..., Path], tmp_path: Path
) -> None:
    _, text = _described(plain_plan("short", seq_len=8))
    assert "value[:, :8].contiguous()" in text.batch
    path = plain_plan("three", seq_len=8)
    plan, loaded = open_plan(path)
    model = tmp_path / "model.py"
    model.write_text(
        loaded.path.read_text()
        + "\n\ndef example_batch(rows):\n"
        + '    return {"ids": torch.zeros(rows, 16, dtype=torch.long),\n'
        + '            "targets": torch.zeros(rows, 16, 1, dtype=torch.long)}\n'
    )
    import claw_plan.planner.model_source as source

    with pytest.raises(ExecutionError, match="let example_batch take a second argument"):
        describe(plan, source.load_model(model), tmp_path)
