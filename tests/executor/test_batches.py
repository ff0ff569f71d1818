from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.executor.batches import (
    ExampleSource,
    ModelSource,
    TextSource,
    check_vocabulary,
    make_source,
    own_slice,
)
from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.opened_plan import open_plan
from claw_plan.planner.model_source import load_model
from claw_plan.planner.plan import load_plan
from claw_plan.profiles.errors import InputError


@given(st.integers(1, 4), st.integers(1, 5))
def test_slices_in_order_are_the_batch(count: int, rows: int) -> None:
    batch = {"x": torch.arange(count * rows * 2).view(-1, 2)}
    parts = [own_slice(batch, index, count)["x"] for index in range(count)]
    assert torch.equal(torch.cat(parts), batch["x"])
    assert {len(part) for part in parts} == {rows}


def test_example_batches_are_new_each_step_and_the_same_on_every_rank(
    tiny_plan: Callable[..., Path],
) -> None:
    plan, loaded = open_plan(tiny_plan("examples"))
    one, other = ExampleSource(plan, loaded), ExampleSource(plan, loaded)
    state = torch.get_rng_state()
    first = one.global_batch(0)
    assert first["idx"].shape == (8, 16)
    assert torch.equal(first["idx"], other.global_batch(0)["idx"])
    assert not torch.equal(first["idx"], one.global_batch(1)["idx"])
    assert torch.equal(state, torch.get_rng_state())


def test_text_fills_tokens_and_their_followers(
    tiny_plan: Callable[..., Path], tmp_path: Path
) -> None:
    text = tmp_path / "data.txt"
    text.write_bytes(bytes(range(200)))
    plan, loaded = open_plan(tiny_plan("text", global_batch=4))
    source = make_source(plan, loaded, text)
    batch = source.global_batch(1)
    assert str(text) in source.says
    # A step takes 4 samples of 16 bytes; the second step begins at byte 64.
    assert batch["idx"][0].tolist() == list(range(64, 80))
    assert batch["targets"][0].tolist() == list(range(65, 81))
    assert batch["idx"][3].tolist() == list(range(112, 128))


def test_labels_that_a_model_shifts_itself_are_the_tokens(
    config_plan: Callable[..., Path], tmp_path: Path
) -> None:
    text = tmp_path / "data.txt"
    text.write_bytes(bytes(100))
    plan, loaded = open_plan(config_plan("gpt2", "text"))
    batch = TextSource(plan, loaded, text).global_batch(0)
    assert torch.equal(batch["input_ids"], batch["labels"])


def test_a_short_text_and_a_missing_one_are_refused(
    tiny_plan: Callable[..., Path], tmp_path: Path
) -> None:
    plan, loaded = open_plan(tiny_plan("short"))
    with pytest.raises(InputError, match="No such file"):
        TextSource(plan, loaded, tmp_path / "none.txt")
    (tmp_path / "short.txt").write_bytes(b"short")
    with pytest.raises(InputError, match="has 5 bytes, but one sample needs 17"):
        TextSource(plan, loaded, tmp_path / "short.txt")


def test_bytes_need_a_vocabulary_of_256() -> None:
    check_vocabulary(nn.Sequential(nn.Embedding(256, 2), nn.Embedding(3, 2)))
    with pytest.raises(ExecutionError, match="holds 61"):
        check_vocabulary(nn.Embedding(61, 2))


OWN_DATA = """
import torch, torch.nn as nn
def build_model(): return nn.Linear(1, 1)
def example_batch(n): return {"input": torch.zeros(n, 1)}
def loss(output, batch): return output.mean()
def train_data(rank, world_size):
    for start in range(0, 12, 3):
        yield {"input": torch.arange(start, start + 3.0).view(3, 1)}
"""


def test_a_models_own_data_is_cut_anew_and_starts_again(
    tiny_plan: Callable[..., Path], tmp_path: Path
) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN_DATA)
    plan = load_plan(tiny_plan("own", global_batch=8))
    source = make_source(plan, load_model(file), None)
    assert isinstance(source, ModelSource)
    assert source.global_batch(0)["input"].flatten().tolist() == list(range(8))
    assert source.global_batch(1)["input"].flatten().tolist() == [8, 9, 10, 11, 0, 1, 2, 3]
    with pytest.raises(ValueError, match="in order"):
        source.global_batch(1)


def test_a_later_step_of_a_models_own_data_is_what_it_would_have_been(
    tiny_plan: Callable[..., Path], tmp_path: Path
) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN_DATA.replace("torch.arange(start, start + 3.0)", "torch.rand(3)"))
    plan = load_plan(tiny_plan("later", global_batch=8))
    uninterrupted, resumed = (make_source(plan, load_model(file), None) for _ in range(2))
    torch.manual_seed(7)
    batches = [uninterrupted.global_batch(step)["input"] for step in range(4)]
    torch.manual_seed(8)  # what else a process draws does not matter
    before = torch.get_rng_state()
    assert torch.equal(resumed.global_batch(3)["input"], batches[3])
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(batches[0], batches[3])


def test_data_that_never_comes_is_refused(tiny_plan: Callable[..., Path], tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN_DATA.replace("range(0, 12, 3)", "()"))
    source = make_source(load_plan(tiny_plan("none")), load_model(file), None)
    with pytest.raises(InputError, match="gives no batch"):
        source.global_batch(0)
