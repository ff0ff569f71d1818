from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from claw_plan.executor.gradients import share_of_mean
from claw_plan.executor.pipeline import (
    RecordedStage,
    _as_sent,
    _make_contiguous,
    make_pipeline,
    time_sends,
)
from claw_plan.executor.ranks import Rank
from claw_plan.planner.plan import PlanSchedule

CPU = torch.device("cpu")


class MeanLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).mean()


def test_one_stage_runs_its_actions_in_order_and_means_its_losses(alone: Rank) -> None:
    ran: list[tuple[str, str, bool]] = []

    @contextmanager
    def recorded(kind: str, name: str, *, awaits_peer: bool = False) -> Iterator[None]:
        ran.append((kind, name, awaits_peer))
        yield

    group = dist.group.WORLD
    assert group is not None
    stage = RecordedStage(MeanLoss(), 0, 1, CPU, group, recorded)
    schedule = PlanSchedule(name="1F1B", stages_per_rank=1, num_microbatches=2)
    run = make_pipeline([stage], schedule, CPU, share_of_mean)
    whole = torch.arange(8.0).view(4, 2)
    loss = run([{"x": whole[:2]}, {"x": whole[2:]}])
    with torch.no_grad():
        expected = stage.submod(whole)
    torch.testing.assert_close(loss.float(), expected)
    torch.testing.assert_close(stage.submod.layer.weight.grad, whole.mean(0, keepdim=True))
    computations = [(kind, name) for kind, name, _ in ran if kind != "other"]
    assert computations == [
        ("forward", "0F0"),
        ("backward", "0B0"),
        ("forward", "0F1"),
        ("backward", "0B1"),
    ]
    assert not any(awaits for _, _, awaits in ran)
    assert time_sends([stage], "1F1B", group, alone) == {}


class Chained(nn.Module):
    """A stage of three: a layer and, at the end, a mean; counts its calls in a buffer."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer, self.index = nn.Linear(2, 2, dtype=torch.double), index
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, *hidden: torch.Tensor, x: torch.Tensor) -> Any:
        self.calls += 1
        out = self.layer(hidden[0] if hidden else x).tanh()
        return out.mean() if self.index == 2 else (out,)


@pytest.mark.parametrize("splits", [True, False])
def test_split_actions_of_several_stages_are_the_whole_backward(
    alone: Rank, *, splits: bool
) -> None:
    torch.manual_seed(0)
    modules = [Chained(index) for index in range(3)]
    x = torch.randn(4, 2, dtype=torch.double)
    hidden: Any = x
    for module in modules:
        out = module(*([hidden] if module.index else []), x=x)
        hidden = out if module.index == 2 else out[0]
    hidden.backward()
    expected = [module.layer.weight.grad for module in modules]
    ran: list[str] = []

    @contextmanager
    def recorded(kind: str, name: str, *, awaits_peer: bool = False) -> Iterator[None]:
        ran.append(name)
        yield

    group = dist.group.WORLD
    assert group is not None
    stages = [
        RecordedStage(module, module.index, 3, CPU, group, recorded, splits=splits)
        for module in modules
    ]
    for module in modules:
        module.zero_grad()
        module.calls.zero_()
    schedule = PlanSchedule(name="InterleavedZeroBubble", stages_per_rank=3, num_microbatches=2)
    run = make_pipeline(stages, schedule, CPU, share_of_mean)
    loss = run([{"x": x[:2]}, {"x": x[2:]}])
    torch.testing.assert_close(loss, hidden.detach())
    for module, gradient in zip(modules, expected, strict=True):
        torch.testing.assert_close(module.layer.weight.grad, gradient, rtol=0, atol=1e-14)
        assert module.calls == 2  # and not the call by which shapes were learned
    assert [name for name in ran if name[0] == "1"] == [
        "1F0", "1I0", "1W0", "1F1", "1I1", "1W1",
    ]  # fmt: skip


def test_gradients_are_sent_contiguous() -> None:
    """Those of an input that the stage permutes (as CLIP's blocks do) lie in another order."""
    gradient = torch.arange(6.0).view(2, 3).t()
    sent, nothing = _as_sent((gradient, None))
    assert sent is not None and sent.is_contiguous() and torch.equal(sent, gradient)
    assert nothing is None


def test_gradients_are_received_contiguous() -> None:
    received = [SimpleNamespace(buffer=torch.empty(4, 17, 8).transpose(0, 1))]
    _make_contiguous([*received, SimpleNamespace(buffer=None)])
    assert received[0].buffer.is_contiguous() and received[0].buffer.shape == (17, 4, 8)
