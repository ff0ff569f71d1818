"""Parameters that compressed optimizers cannot take are refused before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.optimizers.one_bit_adam import OneBitAdam
from claw_plan.executor.ranks import Rank

Found = list[dict[str, Any]]


def test_sharded_parameters_are_refused(alone: Rank) -> None:
    net = fully_shard(nn.Linear(3, 2))
    with pytest.raises(ExecutionError, match=r"one of shape \[2, 3\] is a DTensor"):
        OneBitAdam(net.parameters(), warmup_steps=1)


def test_steps_are_counted_through_a_state_dict(alone: Rank) -> None:
    net = nn.Linear(3, 2)
    optimizer = OneBitAdam(net.parameters(), warmup_steps=3)
    for _ in range(2):
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    other = OneBitAdam(net.parameters(), warmup_steps=3)
    assert other.steps_done == 0
    other.load_state_dict(optimizer.state_dict())
    assert (other.steps_done, other.meets_gradients) == (2, True)
    other.step()
    assert (other.steps_done, other.meets_gradients) == (3, False)


@pytest.mark.slow
def test_ranks_with_other_parameters_are_refused(found: Found) -> None:
    assert found[0]["refused"]["errors"][3] == (
        "ExecutionError: compressed optimizers need the same parameters on every rank, but rank "
        "1 of the group has others than this one (as ZeroRedundancyOptimizer hands them out); "
        "use compress=False there"
    )
