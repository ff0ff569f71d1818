"""Running statistics of several ranks against one process that sees all microbatches in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from claw_plan.executor.batch_norm import RunningStatistics, WithoutStatistics
from claw_plan.executor.recompute import recompute


class Ranks:
    """Plays the group of one axis: `all_gather` answers with what every rank would send."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.sizes = {"dp_shard": 3, "dp_replicate": 1}

    def group(self, axis: str) -> str:
        return axis

    def all_gather(self, found: list[torch.Tensor], own: torch.Tensor, group: Any) -> None:
        for place, sent in zip(found, self.sent, strict=True):
            place.copy_(sent)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_equal_to_one_process(momentum: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randn(3, 2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    one = nn.BatchNorm1d(4, momentum=momentum).double()
    ranks = [nn.BatchNorm1d(4, momentum=momentum).double() for _ in range(3)]
    for norm in (one, *ranks):
        norm(torch.full((2, 4), 3.0, dtype=torch.float64) + torch.eye(2, 4))  # an earlier step
    for microbatch in data.flatten(0, 1):
        one(microbatch)
    axis: Any = Ranks()
    statistics = [RunningStatistics([norm], axis) for norm in ranks]
    for norm, own in zip(ranks, data, strict=True):
        for microbatch in own:
            norm(microbatch)

    def note(found: object, own: torch.Tensor, group: object) -> None:
        axis.sent.append(own.clone())
        raise InterruptedError

    monkeypatch.setattr(dist, "get_world_size", lambda group: 3)
    monkeypatch.setattr(dist, "all_gather", note)
    starts = [list(of_rank._starts) for of_rank in statistics]
    for of_rank in statistics:
        with pytest.raises(InterruptedError):
            of_rank.compose()
    monkeypatch.setattr(dist, "all_gather", axis.all_gather)
    for norm, of_rank, begun in zip(ranks, statistics, starts, strict=True):
        of_rank._starts = begun
        of_rank.compose()
        for name, value in one.state_dict().items():
            torch.testing.assert_close(norm.state_dict()[name], value, rtol=1e-12, atol=0)


def test_forwards_without_gradients_are_no_step() -> None:
    axis: Any = Ranks()
    norm = nn.BatchNorm1d(2)
    statistics = RunningStatistics([norm], axis)
    with torch.no_grad():
        norm(torch.ones(2, 2))
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    statistics.compose()  # without a process group: asking another rank would raise
    for name, value in norm.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_recompute_counts_a_microbatch_once() -> None:
    plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    again = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    again.load_state_dict(plain.state_dict())
    recompute(again, "full")
    x = torch.randn(4, 3)
    for block in (plain, again):
        block(x).square().sum().backward()
    for name, value in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_statistics_are_put_back() -> None:
    norm = nn.BatchNorm1d(2)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    with WithoutStatistics(norm):
        norm(torch.randn(3, 2))
    assert all(torch.equal(norm.state_dict()[name], value) for name, value in before.items())
