from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from claw_plan.executor.dropout import OwnNumbers, seed_forwards

CPU = torch.device("cpu")


def place(data_index: int, pp: int, tp: int) -> Any:
    where = {"pp": pp, "tp": tp}
    return SimpleNamespace(
        data_index=data_index, sizes={"pp": 2, "tp": 2}, index=where.__getitem__
    )


def drawn(data_index: int, pp: int, tp: int) -> tuple[float, ...]:
    seed_forwards(place(data_index, pp, tp), seed=3)
    return tuple(torch.rand(4).tolist())


def test_shards_and_stages_draw_their_own_numbers_and_tp_ranks_the_same() -> None:
    with torch.random.fork_rng(devices=[]):
        numbers = {(d, p, t): drawn(d, p, t) for d in (0, 1) for p in (0, 1) for t in (0, 1)}
    assert len(set(numbers.values())) == 4
    assert all(numbers[d, p, 0] == numbers[d, p, 1] for d in (0, 1) for p in (0, 1))


def masks(index: int, *, again: bool = False) -> tuple[list[float], list[float], list[float]]:
    """Before, inside and after a block on the tensor-parallel rank `index`."""
    torch.manual_seed(0)
    block = nn.Dropout(0.5)
    OwnNumbers([block], index, CPU)
    ones = torch.ones(32)
    before, inside, after = ones.bernoulli(0.5), block(ones), ones.bernoulli(0.5)
    return before.tolist(), inside.tolist(), after.tolist()


def test_inside_blocks_ranks_differ_and_around_them_they_agree() -> None:
    with torch.random.fork_rng(devices=[]):
        one, other, once_more = masks(0), masks(1), masks(0)
    assert one == once_more
    assert one[0] == other[0] and one[2] == other[2]
    assert one[1] != other[1]


def test_recompute_draws_the_blocks_numbers_again() -> None:
    with torch.random.fork_rng(devices=[]):
        block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        plain = block.forward
        OwnNumbers([block], 1, CPU)
        gradients = []
        for remembers in (True, False):
            torch.manual_seed(5)
            block.forward = (  # type: ignore[method-assign]
                plain if remembers else lambda x: checkpoint(plain, x, use_reentrant=False)
            )
            block(torch.ones(4, 8)).square().sum().backward()
            gradient = block[0].weight.grad
            assert gradient is not None
            gradients.append(gradient.clone())
            block.zero_grad()
    assert torch.equal(*gradients)
