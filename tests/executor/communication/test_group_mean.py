"""Errors go out under the names by which they come in; test_hooks.py has means of real ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from claw_plan.executor.communication.group_mean import GroupMean
from claw_plan.executor.ranks import Rank
from claw_plan.kernels.codec import codec_of


def test_errors_keep_their_names(alone: Rank) -> None:
    assert dist.group.WORLD is not None
    means = GroupMean(dist.group.WORLD, codec_of("one_bit"))
    state = {
        f"group0.{bucket}.{place}.residual": torch.full((3,), float(bucket))
        for bucket in range(2)
        for place in ("worker", "server")
    }
    means.load_state_dict(state)
    assert sorted(means.feedback) == ["group0.0", "group0.1"]
    again = means.state_dict()
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], error) for name, error in state.items())
    means.load_state_dict({})
    assert means.state_dict() == {}


def test_one_rank_sends_nothing_and_loses_nothing(alone: Rank) -> None:
    assert dist.group.WORLD is not None
    means = GroupMean(dist.group.WORLD, codec_of("one_bit"))
    vector = torch.tensor([1.0, -2.0, 3.0])
    assert torch.equal(means.compressed("b", vector), vector)
    assert torch.equal(means.whole(vector), vector)
