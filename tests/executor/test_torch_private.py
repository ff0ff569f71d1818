from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from torch.distributed.pipelining import PipelineStage

from claw_plan.executor.ranks import Rank
from claw_plan.executor.torch_private import fake_mode, pipeline_runtime
from claw_plan.planner.schedules import schedule_actions


def test_fake_tensors_meet_real_ones() -> None:
    layer = nn.Linear(2, 3)
    with fake_mode():
        out = layer(torch.ones(4, 2))
    assert out.shape == (4, 3)
    assert type(out).__name__ == "FakeTensor"


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_the_runtime_takes_our_rows(name: str, alone: Rank) -> None:
    layer = nn.Linear(2, 1)
    stage = PipelineStage(layer, 0, 1, torch.device("cpu"))
    rows = [[str(action) for action in row] for row in schedule_actions(name, 1, 4)]
    runtime = pipeline_runtime([stage], rows, 4, lambda out, target: (out - target).sum() / 4)
    data = torch.arange(8.0).view(4, 2)
    runtime.step(data, target=torch.zeros(4, 1))
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, data.mean(0, keepdim=True))


def test_stages_of_a_rank_stay_gathered_until_their_last_action(alone: Rank) -> None:
    """Torch's own default keeps three."""
    stages = [PipelineStage(nn.Linear(2, 2), i, 5, torch.device("cpu")) for i in range(5)]
    rows = [[f"{s}F{m}" for m in (0, 1) for s in range(5)]]
    rows[0] += [f"{s}B{m}" for m in (0, 1) for s in reversed(range(5))]
    runtime = pipeline_runtime(stages, rows, 2, lambda out, target: out.sum())
    found = [str(action) for action in runtime.pipeline_order_with_comms[0]]
    assert [text for text in found if "UNSHARD" in text] == [f"{s}UNSHARD" for s in range(5)]
    assert next(text for text in found if "RESHARD" in text and "UN" not in text) == "4RESHARD"
    assert found.index("4RESHARD") > found.index("4B1")
