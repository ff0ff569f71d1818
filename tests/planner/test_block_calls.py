from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn as nn

from claw_plan.planner.block_calls import block_calls


class Counting(nn.Module):
    """Writes into the cache that it is given, as decoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, h: torch.Tensor, mask: torch.Tensor, *, cache: Any) -> torch.Tensor:
        cache.seen += 1
        return self.linear(h) * mask * cache.seen


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting() for _ in range(2))

    def forward(self, h: torch.Tensor, cache: Any) -> torch.Tensor:
        mask = torch.ones(3)
        for _ in range(2):
            for block in self.blocks:
                h = block(h, mask, cache=cache)
        return h


def test_a_block_is_called_again_as_it_was_first_and_changes_no_argument() -> None:
    model, cache = Model(), SimpleNamespace(seen=0)
    h = torch.randn(2, 3)
    calls = block_calls(model, ["blocks.1"], lambda: model(h, cache))
    assert list(calls) == ["blocks.1"] and cache.seen == 4
    call = calls["blocks.1"]
    hidden, mask = call.args
    torch.testing.assert_close(hidden, model.blocks[0].linear(h))
    for _ in range(2):
        torch.testing.assert_close(call.run(), model.blocks[1].linear(hidden) * 2)
    doubled = call.run(lambda value: value * 2 if value is mask else value)
    torch.testing.assert_close(doubled, model.blocks[1].linear(hidden) * 4)


def test_the_hidden_state_trains_without_its_history_and_constants_do_not() -> None:
    model = Model()
    calls = block_calls(
        model, ["blocks.1"], lambda: model(torch.randn(2, 3), SimpleNamespace(seen=0))
    )
    hidden, mask = calls["blocks.1"].args
    assert hidden.requires_grad and hidden.is_leaf and not mask.requires_grad
