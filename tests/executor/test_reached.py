from __future__ import annotations

import torch
import torch.nn as nn

from claw_plan.executor.ranks import Rank
from claw_plan.executor.reached import leave_unreached, unreached


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(2, 1)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.frozen(self.body(x)))
        self.unused(hidden)  # runs, but its result is not in the loss
        loss: torch.Tensor = self.used(hidden).mean()
        return loss


def test_names_what_the_loss_does_not_reach_and_leaves_the_model_as_it_was() -> None:
    model = TwoHeads()
    state, before = torch.get_rng_state(), model.norm.running_mean.clone()  # type: ignore[union-attr]
    found = unreached(model, lambda module: module(torch.ones(3, 2)))
    assert found == {"unused.weight", "unused.bias"}
    assert torch.equal(torch.get_rng_state(), state)
    assert model.norm.running_mean is not None and torch.equal(model.norm.running_mean, before)
    assert all(parameter.grad is None for parameter in model.parameters())


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.one if x.sum() > 0 else self.other
        loss: torch.Tensor = chosen(x).mean()
        return loss


def test_where_the_batch_decides_all_may_be_left_out() -> None:
    found = unreached(Branches(), lambda module: module(torch.ones(2, 1)))
    assert found == {"one.weight", "other.weight"}


def test_zeros_that_stand_for_no_gradient_are_taken_away(alone: Rank) -> None:
    zero, some, none = (nn.Parameter(torch.ones(2)) for _ in range(3))
    zero.grad, some.grad = torch.zeros(2), torch.tensor([0.0, 1.0])
    leave_unreached([zero, some, none], [])
    assert zero.grad is None and none.grad is None and some.grad is not None
