"""Clipping against torch's own, and what of the norm each rank counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn

from claw_plan.executor.clipping import clip, counted_here, global_norm
from claw_plan.executor.ranks import Rank

CPU = torch.device("cpu")


def with_gradient(*values: float) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(values), dtype=torch.float64))
    parameter.grad = torch.tensor(values, dtype=torch.float64)
    return parameter


@pytest.mark.parametrize("max_norm", [0.5, 13.0, 100.0])
def test_clips_as_torch_does(alone: Rank, max_norm: float) -> None:
    ours = [with_gradient(3.0, 4.0), with_gradient(12.0), nn.Parameter(torch.zeros(1))]
    theirs = [with_gradient(3.0, 4.0), with_gradient(12.0)]
    norm = global_norm(ours, CPU)
    assert norm.item() == 13.0  # 3, 4, 12
    clip(ours, norm, max_norm)
    torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    for own, other in zip(ours, theirs, strict=False):
        assert own.grad is not None and other.grad is not None
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-15, atol=0)
    assert ours[2].grad is None


def test_no_gradients_have_no_norm(alone: Rank) -> None:
    assert global_norm([], CPU).item() == 0.0


class AtPlace(SimpleNamespace):
    state_axes = ("cp", "dp_shard", "dp_replicate")

    def index(self, axis: str) -> int:
        return int(getattr(self, axis, 0))


@pytest.mark.parametrize(
    ("place", "divided", "first_holder", "counted"),
    [
        ({}, False, True, True),
        ({"dp_replicate": 1}, False, True, False),  # a replica's copy
        ({"tp": 1}, False, True, False),  # a norm that every tp rank holds
        ({"tp": 1}, True, True, True),  # another part of a divided weight
        ({"tp": 1, "dp_replicate": 1}, True, True, False),
        ({"dp_shard": 1}, False, True, False),  # whole parameters are no shards
        ({"cp": 1}, False, True, False),  # nor where sequences are shared
        ({"pp": 1}, False, True, True),
        ({"pp": 1}, False, False, False),  # the second end of a tied table
    ],
)
def test_each_part_is_counted_once(
    place: dict[str, int], divided: bool, first_holder: bool, counted: bool
) -> None:
    tied: Any = SimpleNamespace(is_first_holder=lambda name: first_holder)
    mesh: Any = AtPlace(**place)
    held = {"weight": nn.Parameter(torch.ones(1))}
    assert bool(counted_here(held, mesh, lambda name: divided, tied)) == counted
