"""Trains a small chain with `Replicas` beside DistributedDataParallel and writes what was seen.

Started for each rank by tests as `python rank_reducer.py RANK WORLD_SIZE FOLDER`. Writes
`rank<r>.json`: for each case the largest relative distance of the gradients to those of
DistributedDataParallel and to exact means, whether all bits are equal to its, and what was said.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import rank_script
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from claw_plan.executor.communication.compressed import compressed_mean
from claw_plan.executor.communication.reducer import Replicas
from claw_plan.executor.errors import ExecutionError
from claw_plan.kernels.codec import codec_of

LAYERS, WIDTH = 5, 33
TRAINED = 2 * LAYERS + 1
STEPS = 3
"""After its first step DistributedDataParallel lays its buckets out anew."""


class Scale(nn.Module):
    """One factor."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))


class Chain(nn.Module):
    """Layers in order, or, `backwards`, run in another order than they are registered in.

    `spare` is reached where `uses_spare` says so.
    """

    def __init__(self, *, backwards: bool = False, uses_spare: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.spare = Scale()
        self.backwards, self.uses_spare = backwards, uses_spare

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers) if self.backwards else self.layers:
            x = torch.tanh(layer(x))
        return (x * self.spare.factor if self.uses_spare else x).square().mean()


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def trained(
    module: nn.Module, rank: int, microbatches: int = 1, steps: int = STEPS
) -> list[Tensor | None]:
    """Gradients of the last of some steps.

    The optimizer changes nothing: else the first step's layout would be in the last one's bits.
    """
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    found: list[Tensor | None] = []
    for step in range(steps):
        for index in range(microbatches - 1):
            with module.no_sync():
                module(inputs(rank, 10 * step + index)).backward()
        module(inputs(rank, 10 * step + microbatches)).backward()
        found = gradients(module)
        optimizer.step()
        optimizer.zero_grad()
    return found


def distance(one: list[Tensor | None], other: list[Tensor | None]) -> float:
    assert [g is None for g in one] == [g is None for g in other]
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    scale = max(b.abs().max().item() for _, b in pairs)
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs) / scale


def exact(rank: int, group: dist.ProcessGroup, **of_chain: Any) -> list[Tensor | None]:
    """The means of the first step, in float64."""
    module = Chain(**of_chain).double()
    module(inputs(rank, 1).double()).backward()
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= group.size()
    return gradients(module)


def beside_ddp(
    rank: int, group: dist.ProcessGroup, sizes: tuple[int, ...], microbatches: int = 1
) -> dict[str, Any]:
    ours = trained(Replicas(Chain(), group, sizes), rank, microbatches)
    ddp = DistributedDataParallel(Chain(), process_group=group, gradient_as_bucket_view=True)
    theirs = trained(ddp, rank, microbatches)
    equal = all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    return {"error": distance(ours, theirs), "equal": equal}


def other_order(rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """Buckets that are complete in the wrong order wait for the ones before them."""
    order: list[int] = []

    def mean(index: int, buffer: Tensor) -> Tensor:
        order.append(index)
        dist.all_reduce(buffer, group=group)
        return buffer / group.size()

    replicas = Replicas(Chain(backwards=True), group, (2,) * LAYERS + (1,), mean=mean)
    found = trained(replicas, rank, steps=1)
    return {"error": distance(found, exact(rank, group, backwards=True)), "order": order}


def coded(rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
    codec = codec_of("none")

    def mean(index: int, buffer: Tensor) -> Tensor:
        return compressed_mean(buffer, codec, None, group)

    found = trained(Replicas(Chain(), group, (3, TRAINED - 3), mean=mean), rank, steps=1)
    return {"error": distance(found, exact(rank, group))}


def missed(rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """`spare` is reached on rank 0 alone; zeros stand in elsewhere."""
    module = Chain(uses_spare=rank == 0)
    found = trained(Replicas(module, group, (TRAINED,), may_miss=True), rank, steps=1)
    said = ""
    try:
        replicas = Replicas(Chain(uses_spare=False), group, (TRAINED,))
        replicas(inputs(rank, 1)).backward()
    except ExecutionError as error:
        said = str(error)
    *others, spare = found
    assert spare is not None
    return {"error": distance(others, exact(rank, group)[:-1]), "said": said,
            "spare": spare.item()}  # fmt: skip


def given_up(rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """A backward that ends in the middle leaves nothing behind for the next."""
    module = Chain()
    replicas = Replicas(module, group, (1,) * TRAINED)
    handle = module.layers[1].register_full_backward_hook(_interrupt)
    try:
        replicas(inputs(rank, 1)).backward()
    except InterruptedError:
        handle.remove()
    replicas.zero_grad()
    return {"error": distance(trained(replicas, rank, steps=1), exact(rank, group))}


def _interrupt(*_: object) -> None:
    raise InterruptedError


def cases(rank: int, world: dist.ProcessGroup, pair: dist.ProcessGroup | None,
          three: dist.ProcessGroup | None) -> Iterator[tuple[str, Callable[[], Any]]]:  # fmt: skip
    yield "one bucket", lambda: beside_ddp(rank, world, (TRAINED,))
    yield "a bucket each", lambda: beside_ddp(rank, world, (1,) * TRAINED)
    yield "uneven", lambda: beside_ddp(rank, world, (4, 1, 5, 1))
    yield "microbatches", lambda: beside_ddp(rank, world, (TRAINED,), microbatches=3)
    if pair is not None:
        yield "two ranks", lambda: beside_ddp(rank, pair, (4, 1, 5, 1))
    if three is not None:
        yield "three ranks", lambda: beside_ddp(rank, three, (TRAINED,))
    yield "other order", lambda: other_order(rank, world)
    yield "coded", lambda: coded(rank, world)
    yield "missed", lambda: missed(rank, world)
    yield "given up", lambda: given_up(rank, world)


def main(rank: int, world_size: int, folder: Path) -> None:
    world = dist.group.WORLD
    assert world is not None
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    three = dist.new_group([0, 1, 2])
    chosen = cases(rank, world, halves[rank // 2], three if rank < 3 else None)
    found = {name: case() for name, case in chosen}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    rank_script.run(main)
