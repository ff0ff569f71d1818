from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn as nn

from claw_plan.executor.gradients import share_of_mean
from claw_plan.executor.pipeline import RecordedStage, make_pipeline, time_sends
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
    run = make_pipeline(stage, schedule, CPU, share_of_mean)
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
    assert time_sends(stage, group) == {}
