"""Means of gradients on three ranks, through codecs and by algorithms, and what is left over.

Started for each rank by tests as `python rank_hooks.py RANK WORLD_SIZE FOLDER`; writes what each
case found to `rank<r>.pt`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import rank_script
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from claw_plan.executor.communication.group_mean import GroupMean
from claw_plan.executor.communication.hooks import GradientMean, compress_gradients
from claw_plan.executor.communication.power_sgd import LowRankMean, attach_power_sgd
from claw_plan.executor.communication.shard_mean import ShardMean, reduce_by
from claw_plan.executor.traffic import TrafficCounter
from claw_plan.kernels.codec import codec_of

CODECS = ("none", "one_bit", "top_k:0.1")
NUMEL = 1003


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def vector(rank: int, step: int, numel: int = NUMEL) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(numel, generator=generator, dtype=torch.float64)


def sums_of_means() -> dict[str, Any]:
    """What came out in ten rounds, what went in, and this rank's errors afterwards."""
    found = {}
    for codec in CODECS[1:]:
        means = GroupMean(world(), codec_of(codec))
        came = torch.zeros(NUMEL, dtype=torch.float64)
        went = torch.zeros_like(came)
        for step in range(10):
            own = vector(dist.get_rank(), step)
            went += own
            came += means.compressed("b", own)
        found[codec] = {"came": came, "went": went, "errors": means.state_dict()}
    return found


def means_of_parts() -> dict[str, Any]:
    """What came of this rank's equal part in ten rounds, what went in, and the errors."""
    means = ShardMean(world(), codec_of("int4"))
    came, went = torch.zeros(333, dtype=torch.float64), torch.zeros(999, dtype=torch.float64)
    for step in range(10):
        own = vector(dist.get_rank(), step, 999)
        went += own
        came += means.compressed("b", own)
    return {"came": came, "went": went, "errors": means.state_dict()}


def reduced_shards() -> dict[str, torch.Tensor]:
    """This rank's shards of gradients of two modules under fully_shard, by how they reduce."""
    found = {}
    for codec in ("", "fp16", "int8"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 3))
        for module in (model[0], model):
            fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        if codec:
            reduce_by(GradientMean(ShardMean(world(), codec_of(codec))), [model])
        rows = vector(dist.get_rank(), 0, 24).float().view(4, 6)
        model(rows).square().sum().backward()
        shards = [p.grad.to_local().reshape(-1) for p in model.parameters()]  # type: ignore[union-attr]
        found[codec or "own"] = torch.cat(shards)
    return found


def kept_errors() -> dict[str, Any]:
    """A mean after ten others: of who made them, of who loaded the errors, of who forgot them."""
    made = GroupMean(world(), codec_of("one_bit"))
    for step in range(10):
        for key, numel in (("a.b", NUMEL), ("a.c", 77)):
            made.compressed(key, vector(dist.get_rank(), step, numel))
    loaded = GroupMean(world(), codec_of("one_bit"))
    loaded.load_state_dict(made.state_dict())
    forgot = GroupMean(world(), codec_of("one_bit"))
    last = vector(dist.get_rank(), 10)
    return {
        "keys": sorted(made.state_dict()),
        "means": [means.compressed("a.b", last) for means in (made, loaded, forgot)],
    }


def hooked_gradients() -> dict[str, Any]:
    """Gradients of three backwards under DistributedDataParallel, by what goes on the wire."""
    found: dict[str, Any] = {}
    for name, (codec, algorithm) in {
        "plain": ("", ""),
        "whole": ("none", "native"),
        "ring": ("none", "ring"),
        "one_bit": ("one_bit", "native"),
    }.items():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 10))
        model = DistributedDataParallel(net, bucket_cap_mb=0.001)
        if codec:
            compress_gradients(model, GroupMean(world(), codec_of(codec), algorithm=algorithm))
        for step in range(3):
            model.zero_grad()
            model(vector(dist.get_rank(), step, 40).view(2, 20).float()).square().sum().backward()
            gradients = [p.grad.reshape(-1) for p in net.parameters() if p.grad is not None]
            found.setdefault(name, []).append(torch.cat(gradients))
    return found


def with_momentum() -> dict[str, Any]:
    """Ten rounds of one and the same gradient, a tenth of it sent in each; and going on."""
    found = {}
    for codec in ("top_k:1.0", "top_k:0.1"):
        made = GroupMean(world(), codec_of(codec), momentum=0.9)
        came = [made.compressed("b", vector(dist.get_rank(), 0).float()) for _ in range(10)]
        loaded = GroupMean(world(), codec_of(codec), momentum=0.9)
        loaded.load_state_dict(made.state_dict())
        again = [m.compressed("b", vector(dist.get_rank(), 1).float()) for m in (made, loaded)]
        found[codec] = {"came": torch.stack(came), "again": again}
    return found


def low_rank() -> dict[str, Any]:
    """Means of matrices of rank 1 on each rank, and of others over ten rounds."""
    ranks, own = dist.get_world_size(), dist.get_rank()

    def outer(rank: int) -> torch.Tensor:
        return torch.outer(vector(rank, 0, 12), vector(rank, 1, 30))

    matrix, bias = outer(own).clone(), vector(own, 2, 7)
    LowRankMean(world(), ranks).average([0, 1], [matrix, bias])
    exact = sum(outer(rank) for rank in range(ranks)) / ranks
    exact_bias = sum(vector(rank, 2, 7) for rank in range(ranks)) / ranks
    means, came, went = LowRankMean(world(), 1), torch.zeros(12, 30), torch.zeros(12, 30)
    for step in range(10):
        gradient = vector(own, step, 360).view(12, 30)
        went = went + gradient
        means.average([5], [gradient])
        came = came + gradient
    loaded = LowRankMean(world(), 1)
    loaded.load_rank_state(means.rank_state())
    again = [vector(own, 11, 360).view(12, 30) for _ in range(2)]
    means.average([5], [again[0]])
    loaded.average([5], [again[1]])
    return {
        "exact": (matrix, exact), "bias": (bias, exact_bias), "again": again,
        "came": came, "went": went, "error": loaded.rank_state(),
    }  # fmt: skip


def coded_low_rank() -> dict[str, Any]:
    """A hundred rounds of factors in fp16: what came, what went in, and what this rank keeps."""
    own, means = dist.get_rank(), LowRankMean(world(), 2, codec="fp16")
    came, went = torch.zeros(12, 30), torch.zeros(12, 30)
    for step in range(100):
        gradient = vector(own, step, 360).view(12, 30).float()
        went += gradient
        means.average([0], [gradient])
        came += gradient
    return {"came": came, "went": went, "error": means.rank_state()["error.0"]}


def hooked_low_rank() -> dict[str, Any]:
    """Gradients of four backwards, two of them whole, and the bytes of the last."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 10))
    model = DistributedDataParallel(net)
    attach_power_sgd(model, LowRankMean(world(), 2), whole_backwards=2)
    counter, found = TrafficCounter({}), []
    for step in range(4):
        model.zero_grad()
        counter.take()
        with counter.counting(sees_reducer=False):
            loss = model(vector(dist.get_rank(), step, 40).view(2, 20).float()).square().sum()
            loss.backward()
        found.append(
            torch.cat([p.grad.reshape(-1) for p in net.parameters() if p.grad is not None])
        )
    return {"gradients": found, "moved": [tuple(moved) for moved in counter.take().values()]}


CASES: tuple[Callable[[], dict[str, Any]], ...] = (
    sums_of_means, means_of_parts, reduced_shards, kept_errors, hooked_gradients, with_momentum,
    low_rank, coded_low_rank, hooked_low_rank,
)  # fmt: skip


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.save({case.__name__: case() for case in CASES}, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    rank_script.run(main)
