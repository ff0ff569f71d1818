"""Trains with compressed optimizers on four ranks, beside others that do the same another way.

Started for each rank by tests as `python rank_optimizers.py RANK WORLD_SIZE FOLDER`; writes what
each case found to `rank<r>.pt`.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from claw_plan.executor import Adam
from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.optimizers.compressed import CompressedOptimizer
from claw_plan.executor.optimizers.one_bit_adam import OneBitAdam
from claw_plan.executor.optimizers.one_bit_lamb import OneBitLamb
from claw_plan.executor.optimizers.power_sgd_adam import PowerSgdAdam
from claw_plan.executor.optimizers.zero_one_adam import ZeroOneAdam
from claw_plan.executor.traffic import TrafficCounter
from claw_plan.profiles.coded_means import part_bounds

ROWS, USED, CLASSES = 60, 40, 50
RATE = 2.0**-6
"""A power of two: multiplied by it, codes keep their bits."""


def net_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    parts = (nn.Embedding(ROWS, 16), nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, CLASSES))
    return nn.Sequential(*parts).to(dtype)


def backward(net: nn.Module, generator: torch.Generator) -> float:
    """On this rank's own samples; rows from USED on are never among them."""
    tokens = torch.randint(0, USED, (32,), generator=generator)
    loss = nn.functional.cross_entropy(net(tokens), (tokens * 7 + 3) % CLASSES)
    net.zero_grad()
    loss.backward()
    return loss.item()


def generator_of(rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(rank)


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()]).clone()


def trained(
    make: Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]], steps: int
) -> tuple[list[torch.Tensor], list[float]]:
    """The parameters after each step, and the losses."""
    net = net_of()
    model, optimizer = make(net)
    generator, seen, losses = generator_of(dist.get_rank()), [], []
    for _ in range(steps):
        losses.append(backward(model, generator))
        optimizer.step()
        seen.append(flat(net))
    return seen, losses


def attached(kind: type[OneBitAdam], **options: Any) -> Callable[[nn.Module], Any]:
    def make(net: nn.Module) -> tuple[nn.Module, OneBitAdam]:
        model, optimizer = DistributedDataParallel(net), kind(net.parameters(), RATE, **options)
        optimizer.attach(model)
        return model, optimizer

    return make


def warm_is_adamw() -> dict[str, Any]:
    adamw, _ = trained(
        lambda net: (DistributedDataParallel(net), torch.optim.AdamW(net.parameters(), RATE)), 12
    )
    hooked, _ = trained(attached(OneBitAdam, warmup_steps=100), 12)
    alone, _ = trained(lambda net: (net, OneBitAdam(net.parameters(), RATE, warmup_steps=99)), 12)
    zero_one, _ = trained(attached(ZeroOneAdam, warmup_steps=100, variance_repeats=99), 12)
    return {"adamw": adamw, "hooked": hooked, "alone": alone, "zero_one": zero_one}


def one_bit_and_its_limit() -> dict[str, Any]:
    seen, losses = trained(attached(OneBitAdam, warmup_steps=10), 40)
    limit, _ = trained(
        attached(ZeroOneAdam, warmup_steps=10, variance_repeats=99, longest_away=1), 40
    )
    plain, _ = trained(attached(OneBitAdam, warmup_steps=10, preconditioned=False), 30)
    return {"seen": seen, "losses": losses, "limit": limit, "plain": plain}


def power_sgd() -> dict[str, Any]:
    found = {}
    for factors in ("none", "int8"):
        make = attached(PowerSgdAdam, warmup_steps=10, rank=4, factors=factors)
        seen, losses = trained(make, 40)
        found[factors] = {"seen": seen, "losses": losses}
    return found | {"peer": power_sgd_peer(18, 10)}


def power_sgd_peer(steps: int, warmup: int) -> list[torch.Tensor]:
    """The momentum of rank 4 once more: every rank plays all, layer by layer, projectors in fp64.

    A projector onto the span of M Q in place of a basis: P Pᵀ, whatever P.
    """
    ranks, seen = dist.get_world_size(), []
    net = net_of()
    generators = [generator_of(rank) for rank in range(ranks)]
    layers = [
        {
            "p": p, "own": torch.zeros(ranks, *p.shape), "common": torch.zeros_like(p),
            "v": torch.zeros_like(p), "right": None,
        }
        for p in net.parameters()
    ]  # fmt: skip
    for step in range(1, steps + 1):
        for rank, generator in enumerate(generators):
            backward(net, generator)
            for layer in layers:
                layer["own"][rank].lerp_(layer["p"].grad, 0.1)
        for number, layer in enumerate(layers):
            _play(layer, number, step, warmup)
        seen.append(flat(net))
    return seen


@torch.no_grad()
def _play(layer: dict[str, Any], number: int, step: int, warmup: int) -> None:
    """One step of one layer from all ranks' momenta, which have the step's gradients already."""
    mean, common = layer["own"].mean(0), layer["common"]
    if step <= warmup:
        gradient = (mean - 0.9 * common) / 0.1
        layer["v"] = 0.999 * layer["v"] + 0.001 * gradient**2
        layer["own"][:] = mean
    count = min(step, warmup)
    rate = 1 / ((layer["v"] / (1 - 0.999**count)).sqrt() + 1e-8)
    rate = rate.where(layer["v"] > 0, 0)
    change = (mean - common) * rate
    if step > warmup and change.dim() == 2:
        start = torch.randn(
            change.shape[1],
            4,
            generator=torch.Generator().manual_seed(number),
            dtype=torch.float64,
        )
        right = start if layer["right"] is None else layer["right"]
        u, values, _ = torch.linalg.svd(change.double() @ right, full_matrices=False)
        left = u[:, values > 1e-12 * values.max()]
        # The same columns that a QR would give, up to a rotation: only their span goes on.
        layer["right"] = change.double().mT @ left
        change = (left @ left.mT @ change.double()).float()
    common += torch.where(rate > 0, change / rate.where(rate > 0, 1), 0)
    layer["p"] *= 1 - RATE * 0.01
    layer["p"] -= RATE / (1 - 0.9**step) * common * rate


def lamb() -> dict[str, Any]:
    """Ten warm steps beside LAMB written out, then thirty compressed ones."""
    seen, losses = trained(attached(OneBitLamb, warmup_steps=10), 40)
    net, peer = net_of(), []
    generators = [generator_of(rank) for rank in range(dist.get_world_size())]
    moments = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in net.parameters()}
    for step in range(1, 11):
        sums = [torch.zeros_like(p) for p in net.parameters()]
        for generator in generators:
            backward(net, generator)
            for total, p in zip(sums, net.parameters(), strict=True):
                total += p.grad / len(generators)  # type: ignore[operator]
        for gradient, (p, (m, v)) in zip(sums, moments.items(), strict=True):
            m.copy_(0.9 * m + 0.1 * gradient)
            v.copy_(0.999 * v + 0.001 * gradient**2)
            update = m / (1 - 0.9**step) / ((v / (1 - 0.999**step)) ** 0.5 + 1e-8) + 0.01 * p.data
            trust = min(max(float(p.data.norm() / update.norm()), 0.01), 10.0)
            p.data -= RATE * trust * update
        peer.append(flat(net))
    return {"seen": seen, "losses": losses, "peer": peer}


def zero_one() -> dict[str, Any]:
    equal: list[bool] = []

    def make(net: nn.Module) -> tuple[nn.Module, ZeroOneAdam]:
        model, optimizer = attached(
            ZeroOneAdam, warmup_steps=12, variance_repeats=3, meeting_repeats=4, longest_away=4
        )(net)
        optimizer.register_step_post_hook(lambda *_: equal.append(optimizer.replicas_are_equal))
        return model, optimizer

    seen, losses = trained(make, 60)
    return {"seen": seen, "losses": losses, "equal": equal}


def resumed() -> dict[str, Any]:
    """Twelve steps past a save, by those who saved and by others that loaded."""
    found = {}
    for name, make in {
        "one_bit": attached(OneBitAdam, warmup_steps=5),
        "zero_one": attached(ZeroOneAdam, warmup_steps=9, variance_repeats=2, longest_away=2),
        "power_sgd": attached(PowerSgdAdam, warmup_steps=5, rank=2, factors="int8"),
        "lamb": attached(OneBitLamb, warmup_steps=5),
    }.items():
        model, optimizer = make(net_of())
        generator = generator_of(dist.get_rank())
        for _ in range(20):
            backward(model, generator)
            optimizer.step()
        assert isinstance(optimizer, CompressedOptimizer)
        saved = [copy.deepcopy(model.module), copy.deepcopy(optimizer.state_dict())]
        errors = {key: value.clone() for key, value in optimizer.rank_state().items()}
        other, loaded = make(saved[0])
        loaded.load_state_dict(saved[1])
        loaded.load_rank_state(errors)
        again = torch.Generator()
        again.set_state(generator.get_state())
        for _ in range(12):
            backward(model, generator)
            optimizer.step()
            backward(other, again)
            loaded.step()
        found[name] = (flat(model.module), flat(other.module))
    return found


def peer(steps: int, warmup: int) -> list[torch.Tensor]:
    """1-bit Adam once more, every rank playing all four with fp64 sums and explicit loops."""
    ranks, beta1, beta2 = dist.get_world_size(), 0.9, 0.999
    net = net_of()
    generators = [generator_of(rank) for rank in range(ranks)]
    x = flat(net)
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    worker, server, seen = torch.zeros(ranks, len(x)), torch.zeros(len(x)), []
    for step in range(1, steps + 1):
        gradients = []
        for generator in generators:
            backward(net, generator)
            gradients.append(torch.cat([p.grad.reshape(-1) for p in net.parameters()]))  # type: ignore[union-attr]
        x = x * (1 - RATE * 0.01)
        if step <= warmup:
            mean = sum(g / ranks for g in gradients)
            m, v = beta1 * m + (1 - beta1) * mean, beta2 * v + (1 - beta2) * mean * mean
        denominator = (v / (1 - beta2 ** min(step, warmup))).sqrt() + 1e-8
        if step > warmup:
            active = (v > 0).nonzero().view(-1)
            bounds = part_bounds(len(active), ranks)
            sent = torch.stack([((beta1 * m + (1 - beta1) * g) / denominator) for g in gradients])
            sent = sent[:, active] + worker[:, active]
            codes = torch.stack([signs(row, bounds) for row in sent])
            worker[:, active] = sent - codes
            mean = codes.mean(0) + server[active]
            code = signs(mean, bounds)
            server[active] = mean - code
            u = torch.zeros_like(x).index_copy(0, active, code)
            m = u * denominator
        m_used = m if step <= warmup else m.where(v > 0, 0)
        x = x - RATE / (1 - beta1**step) * (m_used / denominator).where(v > 0, 0)
        seen.append(x)
        start = 0
        for p in net.parameters():
            p.data.copy_(x[start : start + p.numel()].view_as(p))
            start += p.numel()
    return seen


def signs(row: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    out = torch.empty_like(row)
    for begin, end in pairwise(bounds):
        part = row[begin:end]
        out[begin:end] = torch.where(part >= 0, 1.0, -1.0) * part.double().abs().mean().float()
    return out


def against_peer() -> dict[str, Any]:
    seen, _ = trained(attached(OneBitAdam, warmup_steps=10), 18)
    return {"ours": seen, "peer": peer(18, 10)}


def counted() -> dict[str, Any]:
    """Bytes of a step's collectives of a model of 131,072 elements, before and after."""
    net = nn.Linear(256, 512, bias=False)
    model = DistributedDataParallel(net)
    optimizer = OneBitAdam(net.parameters(), RATE, warmup_steps=2)
    optimizer.attach(model)
    counter = TrafficCounter({})
    steps = []
    for _ in range(4):
        counter.take()
        with counter.counting(sees_reducer=False):
            model(torch.randn(4, 256)).square().mean().backward()
            optimizer.step()
        steps.append({kind.op: moved.bytes for kind, moved in counter.take().items()})
    return {"steps": steps}


def refused() -> dict[str, Any]:
    net = net_of()
    found = []
    for call in (
        lambda: Adam(net.parameters(), compress=True),
        lambda: Adam(net.parameters(), compress=True, warmup_steps=0),
        lambda: Adam(net.parameters(), compress=True, warmup_steps=5, compression="2bit"),
        lambda: ZeroRedundancyOptimizer(net.parameters(), OneBitAdam, warmup_steps=5),
    ):
        try:
            call()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    kinds = [
        type(Adam(net.parameters())).__name__,
        type(Adam(net.parameters(), compress=True, warmup_steps=5)).__name__,
        type(Adam(net.parameters(), compress=True, warmup_steps=5, compression="0/1")).__name__,
        type(
            Adam(net.parameters(), compress=True, warmup_steps=5, compression="low_rank:2")
        ).__name__,
    ]
    between = ZeroOneAdam(net.parameters(), RATE, warmup_steps=1, meeting_repeats=1)
    for _ in range(3):
        backward(net, generator_of(0))
        between.step()
    try:
        between.rank_state()
    except ExecutionError as error:
        found.append(str(error))
    return {"errors": found, "kinds": kinds}


CASES: tuple[Callable[[], dict[str, Any]], ...] = (
    warm_is_adamw, one_bit_and_its_limit, power_sgd, lamb, zero_one, resumed, against_peer,
    counted,
    refused,
)  # fmt: skip


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    torch.save({case.__name__: case() for case in CASES}, folder / f"rank{rank}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # threads of gloo may still run


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
