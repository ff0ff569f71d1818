"""The front door: which optimizer a call gets, and what it refuses in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from claw_plan.executor import Adam
from claw_plan.executor.errors import ExecutionError

Found = list[dict[str, Any]]


def test_without_compression_it_is_torchs() -> None:
    weights = [torch.nn.Parameter(torch.ones(3))]
    optimizer = Adam(weights, lr=0.1, weight_decay=0.2)
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["lr"] == 0.1
    assert optimizer.defaults["weight_decay"] == 0.2


def test_compression_needs_a_process_group() -> None:
    weights = [torch.nn.Parameter(torch.ones(3))]
    with pytest.raises(ExecutionError, match="needs a process group: call"):
        Adam(weights, compress=True, warmup_steps=5)


@pytest.mark.slow
def test_what_a_compression_is_called(found: Found) -> None:
    assert found[0]["refused"]["kinds"] == [
        *("AdamW", "OneBitAdam", "ZeroOneAdam", "PowerSgdAdam"),
    ]


@pytest.mark.slow
def test_refusals(found: Found) -> None:
    told = found[0]["refused"]["errors"]
    assert told[0] == (
        "ExecutionError: compress=True needs warmup_steps, the first steps that exchange whole "
        "gradients: 15 to 25 % of all steps"
    )
    assert told[1].startswith("ExecutionError: warmup_steps is at least 1, but got 0")
    assert told[2].startswith("CodecError: there is no codec '2bit'")
