from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn as nn

from claw_plan.executor.batches import ExampleSource
from claw_plan.executor.double_mode import DoubleMode
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.reference import (
    reference_steps,
    without_dropout,
    without_functional_dropout,
)
from claw_plan.executor.whole_model import DOUBLE
from claw_plan.planner.errors import PlanError


def test_dropout_modules_stand_at_zero(tiny_plan: Callable[..., Path]) -> None:
    _, loaded = open_plan(tiny_plan("dropout"))
    loaded = dataclasses.replace(loaded, make=lambda: nn.Sequential(nn.Dropout(0.5)))
    assert without_dropout(loaded).build()[0].p == 0.0


def test_dropout_between_the_layers_of_an_lstm_does_too(tiny_plan: Callable[..., Path]) -> None:
    _, loaded = open_plan(tiny_plan("lstm"))
    make = lambda: nn.LSTM(4, 4, 2, dropout=0.5)  # noqa: E731
    model = without_dropout(dataclasses.replace(loaded, make=make)).build()
    x = torch.randn(3, 1, 4)
    assert torch.equal(model(x)[0], model(x)[0])


def test_one_process_learns_and_reports_each_step(tiny_plan: Callable[..., Path]) -> None:
    plan, loaded = open_plan(tiny_plan("steps"))
    with DoubleMode():
        (loss, parameters), (_, later) = reference_steps(
            plan, loaded, ExampleSource(plan, loaded), 2, DOUBLE
        )
    assert loss == pytest.approx(4.1, abs=0.1)  # ln 61: nothing is known yet
    assert {value.dtype for value in parameters.values()} == {torch.float64}
    name = "transformer.h.0.mlp.c_fc.weight"
    assert not torch.equal(parameters[name], later[name])


def test_a_forward_that_draws_is_refused(tiny_plan: Callable[..., Path]) -> None:
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Embedding(61, 4)

        def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return torch.dropout(self.layer(idx), 0.5, True).mean()

    plan, loaded = open_plan(tiny_plan("drawing"))
    loaded = dataclasses.replace(loaded, make=Drawing)
    with pytest.raises(PlanError, match="draws random numbers"):
        list(reference_steps(plan, loaded, ExampleSource(plan, loaded), 1, DOUBLE))


def test_functional_dropouts_do_nothing_inside_and_draw_again_outside() -> None:
    ones = torch.ones(2, 1, 50, 8)
    with without_functional_dropout():
        assert torch.equal(nn.functional.dropout(ones, 0.5), ones)
        assert torch.equal(nn.Dropout2d(0.5)(ones), ones)
        for given in ({"dropout_p": 0.9}, {"is_causal": True}):
            attended = nn.functional.scaled_dot_product_attention(ones, ones, ones, **given)
            torch.testing.assert_close(attended, ones)
        torch.testing.assert_close(
            nn.functional.scaled_dot_product_attention(ones, ones, ones, None, 0.9), ones
        )
    assert not torch.equal(nn.functional.dropout(ones, 0.5), ones)
