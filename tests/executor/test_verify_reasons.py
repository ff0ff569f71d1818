from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn as nn

from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.verify_reasons import likely_reason
from claw_plan.executor.whole_model import SINGLE


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.other = nn.Embedding(61, 4), nn.Embedding(61, 4)
        self.seen = 0

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.table(idx).mean()


class Counting(Model):
    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.table(idx).mean() * self.seen


class Branching(Model):
    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        table = self.table if int(idx[0, 0]) % 2 else self.other
        return table(idx).mean()


def _reason(plan: Path, kind: type[nn.Module], difference: float = 1.0, missing: int = 0) -> str:
    opened, loaded = open_plan(plan)
    loaded = dataclasses.replace(loaded, make=kind)
    return likely_reason(opened, loaded, SINGLE, difference, missing)


def test_each_reason_is_found_where_it_is(tiny_plan: Callable[..., Path]) -> None:
    plan = tiny_plan("reasons")
    assert _reason(plan, Model) == ""
    assert "keeps state" in _reason(plan, Counting)
    assert "some rows never reach" in _reason(plan, Branching)
    assert "overflows" in _reason(plan, Model, difference=float("nan"))
    assert "faulty device" in _reason(plan, Model, missing=1)
