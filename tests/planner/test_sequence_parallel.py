from __future__ import annotations

import torch
import torch.nn as nn

from claw_plan.planner.graph import TensorParallelRule
from claw_plan.planner.sequence_parallel import divide_sequence
from claw_plan.planner.tp_autograd import StandIn

RULES = {
    "0": (
        TensorParallelRule(module="", style="region", heads=1),
        TensorParallelRule(module="up", style="colwise", heads=8, weight_dims={"weight": 0}),
        TensorParallelRule(module="down", style="rowwise", heads=8, weight_dims={"weight": 1}),
    )
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, str]:
        self.seen.append(tuple(x.shape))
        return x * scale, "kept"


def test_the_sequence_is_divided_between_the_ends_of_the_chain_only() -> None:
    told: list[tuple[str, int]] = []
    ranks = StandIn(3, rank=1, exchange=lambda op, num, where: told.append((op, num)))
    blocks = [Block(), Block()]
    handles = divide_sequence(blocks, RULES, ranks)
    x = torch.arange(48.0).view(2, 6, 4).requires_grad_()
    hidden, _ = blocks[0](x)
    assert torch.equal(hidden, x[:, 2:4])
    out, kept = blocks[1](hidden, scale=2.0)
    assert blocks[0].seen == blocks[1].seen == [(2, 2, 4)]
    assert out.shape == x.shape and kept == "kept"
    whole = x.numel() * 4
    assert told == [("all_gather", whole)]
    out.sum().backward()
    # The scattered input's gradient is gathered; what follows the chain is the same on all ranks.
    assert told == [("all_gather", whole)] * 2
    for handle in handles:
        handle.remove()
    assert blocks[0](x)[0].shape == x.shape
