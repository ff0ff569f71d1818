from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn as nn

from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.whole_model import DOUBLE, build_whole, cast_floats, first_names, loss_of
from claw_plan.planner.model_source import load_model
from claw_plan.profiles.errors import InputError


def test_weights_are_those_of_the_seed(tiny_plan: Callable[..., Path]) -> None:
    plan, loaded = open_plan(tiny_plan("seed"))
    one, other = (build_whole(plan, loaded).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    double = build_whole(plan, loaded, DOUBLE).state_dict()
    assert all(torch.equal(one[name].double(), double[name]) for name in one)


def test_tied_parameters_go_by_their_first_name() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    assert first_names(model) == {"a.weight": "a.weight", "b.weight": "a.weight"}


def test_only_floats_are_cast() -> None:
    batch = cast_floats({"x": torch.ones(1), "n": torch.ones(1, dtype=torch.int64)}, torch.double)
    assert (batch["x"].dtype, batch["n"].dtype) == (torch.float64, torch.int64)


def test_a_model_is_given_the_inputs_that_it_takes(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        "import torch\n"
        "def build_model(): return torch.nn.Linear(2, 1, bias=False)\n"
        "def example_batch(size): return "
        "{'input': torch.ones(size, 2), 'y': torch.zeros(size, 1)}\n"
        "def loss(output, batch): return (output - batch['y']).sum()\n"
    )
    loaded = load_model(file)
    model, call = loaded.build(), loss_of(loaded)
    nn.init.ones_(model.weight)
    batch = {"input": torch.ones(3, 2), "y": torch.ones(3, 1)}
    assert [call(model, batch).item() for _ in range(2)] == [3, 3]
    with pytest.raises(InputError, match=r"the batch has \(inputs, y\)"):
        call(model, {"inputs": torch.ones(3, 2), "y": torch.ones(3, 1)})
