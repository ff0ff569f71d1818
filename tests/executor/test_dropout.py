from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as functional
from torch.utils.checkpoint import checkpoint

from claw_plan.executor.dropout import OwnNumbers, seed_forwards
from claw_plan.planner.head_shard import Division, HeadShard, Layout
from claw_plan.planner.tensor_parallel import TRANSLATIONS
from claw_plan.planner.tp_autograd import StandIn

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
    OwnNumbers(index, CPU).inside([block])
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
        OwnNumbers(1, CPU).inside([block])
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


def heads_of(index: int) -> tuple[HeadShard, OwnNumbers]:
    """Two of four heads, [batch, head, sequence, size], on one of two ranks."""
    assert TRANSLATIONS
    own = OwnNumbers(index, CPU)
    division = Division(ranks=StandIn(2, index), where="attention", drawing=own)
    return HeadShard(torch.ones(2, 2, 8, 8), Layout(division=division, dim=1)), own


def attend(heads: HeadShard) -> torch.Tensor:
    return functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)


def drop(heads: HeadShard) -> torch.Tensor:
    return nn.Dropout(0.5)(heads.softmax(-1))


def draw(heads: HeadShard) -> torch.Tensor:
    return (torch.rand_like(heads) < 0.5) * heads


@pytest.mark.parametrize("use", [attend, drop, draw])
def test_divided_heads_draw_their_own_and_what_follows_is_shared(use: Any) -> None:
    found = {}
    with torch.random.fork_rng(devices=[]):
        for run, index in enumerate((0, 1, 0)):
            torch.manual_seed(7)
            heads, _ = heads_of(index)
            result = use(heads)
            assert isinstance(result, HeadShard)
            found[run] = result.local, torch.ones(32).bernoulli(0.5)
    assert not torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][0], found[2][0])
    assert torch.equal(found[0][1], found[1][1])


def test_without_dropout_nothing_is_drawn() -> None:
    heads, _ = heads_of(1)
    before = torch.get_rng_state()
    functional.scaled_dot_product_attention(heads, heads, heads)
    functional.dropout(heads, 0.5, training=False)
    functional.dropout(heads, 0.0)
    assert torch.equal(torch.get_rng_state(), before)


MODEL = """
import torch, torch.nn as nn, torch.nn.functional as F
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.of_heads, self.of_all = nn.Dropout(0.5), nn.Dropout(0.5)
    def forward(self, x):
        b, s, _ = x.shape
        h, several = self.norm(x), (self.q, self.k, self.v)
        q, k, v = (f(h).view(b, s, 4, 4).transpose(1, 2) for f in several)
        weights = self.of_heads((q @ k.transpose(-1, -2)).softmax(-1))
        return x + self.of_all(self.out((weights @ v).transpose(1, 2).reshape(b, s, 16)))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()
def build_model(): return Net()
def example_batch(n): return {"x": torch.randn(n, 6, 16)}
"""

WORKER = """
import os, sys, torch, torch.distributed as dist
from pathlib import Path
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import compile_plan
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
plan, loaded = open_plan(folder / "plan.yaml")
compiled = compile_plan(plan, loaded, torch.device("cpu"))
masks = {"of_heads": [], "of_all": []}
for name, module in compiled.stages[0].model.named_modules():
    for kind, seen in masks.items():
        if name.endswith(kind):
            module.register_forward_hook(
                lambda _, args, out, seen=seen: seen.append(getattr(out, "local", out) != 0)
            )
batch = loaded.example_batch(4)
losses = [compiled.train_step(batch) for _ in range(2)]
whole = {n: p.detach() for n, p in compiled.parameters.items() if "norm" in n or n == "out.bias"}
torch.save((masks, losses, whole), folder / f"{rank}.pt")
dist.barrier()
os._exit(0)
"""


@pytest.mark.slow
def test_tensor_parallel_ranks_drop_other_heads_and_the_same_of_all(
    model_plan: Callable[..., Path], tmp_path: Path
) -> None:
    """Recompute included: each mask is seen twice, and the second time it is the same."""
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "worker.py").write_text(WORKER)
    blocks = ["blocks.0", "blocks.1"]
    path = model_plan(
        tmp_path / "net.py", blocks, "plan", tp=2, microbatch_size=4, global_batch=4,
        recompute="full",
    )  # fmt: skip
    assert path == tmp_path / "plan.yaml"
    command = [sys.executable, str(tmp_path / "worker.py"), str(tmp_path)]
    processes = [subprocess.Popen([*command, rank], stderr=subprocess.PIPE) for rank in "01"]
    for process in processes:
        _, errors = process.communicate(timeout=250)
        assert process.returncode == 0, errors.decode()[-2000:]
    (masks, losses, shared), (other, other_losses, other_shared) = (
        torch.load(tmp_path / f"{rank}.pt") for rank in "01"
    )
    assert losses == other_losses and len(set(losses)) == 2
    assert all(torch.equal(value, other_shared[name]) for name, value in shared.items())
    own, elsewhere = masks["of_heads"], other["of_heads"]
    assert own[0].shape == (4, 2, 6, 6)
    assert len(own) == 2 * 2 * 2  # blocks, forwards with their recompute, steps
    assert not any(torch.equal(*pair) for pair in zip(own, elsewhere, strict=True))
    pairs = zip(masks["of_all"], other["of_all"], strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    first, second, *again = own[:4]
    assert torch.equal(again[0], second) and torch.equal(again[1], first)  # the last block first
