"""The ways of training that convergence.py compares: a model to its replicas and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from claw_plan.executor.communication.group_mean import GroupMean
from claw_plan.executor.communication.hooks import GradientMean, attach, compress_gradients
from claw_plan.executor.communication.power_sgd import LowRankMean, attach_power_sgd
from claw_plan.executor.optimizers.one_bit_adam import OneBitAdam
from claw_plan.executor.optimizers.one_bit_lamb import OneBitLamb
from claw_plan.executor.optimizers.power_sgd_adam import PowerSgdAdam
from claw_plan.executor.optimizers.zero_one_adam import ZeroOneAdam
from claw_plan.kernels.codec import codec_of
from claw_plan.kernels.fp16_scale import Fp16Scale

LEARNING_RATE = 3e-3
"""AdamW's; others have theirs."""

SGD_RATE, LAMB_RATE = 0.3, 0.03
"""The best of 0.1, 0.3 and 1, and of 0.01 and 0.03, after 400 steps of whole gradients."""

WARMUP_SHARE = 0.15
"""How much of the steps goes before variances are frozen, or densities are at their least."""

MOMENTUM = 0.9
"""Of SGD, whoever keeps it."""

DENSITIES = (0.25, 0.0625, 0.0156, 0.004, 0.001)
"""Deep Gradient Compression's, each a fourth of the one before (its section 3.3)."""

Trained = tuple[nn.Module, torch.optim.Optimizer]
Make = Callable[[nn.Module, dist.ProcessGroup, int], Trained]
"""The model, the ranks that train it, the number of steps; to what wraps it and its optimizer."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to train."""

    title: str
    make: Make
    rate: float = LEARNING_RATE
    against: str = "adam"
    """The method that it is compared with: the same optimizer with whole gradients."""


def replicas(net: nn.Module, group: dist.ProcessGroup) -> DistributedDataParallel:
    return DistributedDataParallel(net, process_group=group)


def adam_w(net: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE)


def adam(net: nn.Module, group: dist.ProcessGroup, steps: int) -> Trained:
    model = replicas(net, group)
    compress_gradients(model, GroupMean(group, codec_of("none")))
    return model, adam_w(net)


def momentum(codec: str, **options: Any) -> Make:
    def make(net: nn.Module, group: dist.ProcessGroup, steps: int) -> Trained:
        model, warmup = replicas(net, group), round(WARMUP_SHARE * steps)
        optimizer = OneBitAdam(
            net.parameters(), lr=LEARNING_RATE, codec=codec, warmup_steps=warmup, group=group,
            **options,
        )  # fmt: skip
        optimizer.attach(model)
        return model, optimizer

    return make


def zero_one(**options: Any) -> Make:
    def make(net: nn.Module, group: dist.ProcessGroup, steps: int) -> Trained:
        model, warmup = replicas(net, group), round(WARMUP_SHARE * steps)
        optimizer = ZeroOneAdam(
            net.parameters(), lr=LEARNING_RATE, warmup_steps=warmup, group=group, **options
        )
        optimizer.attach(model)
        return model, optimizer

    return make


def gradients(codec: str) -> Make:
    def make(net: nn.Module, group: dist.ProcessGroup, steps: int) -> Trained:
        model = replicas(net, group)
        compress_gradients(model, GroupMean(group, codec_of(codec)))
        return model, adam_w(net)

    return make


def fp16(net: nn.Module, group: dist.ProcessGroup, steps: int) -> Trained:
    """Gradients times a power of two that moves, as a plan's codec=fp16 does it."""
    model, optimizer = replicas(net, group), adam_w(net)
    means = GroupMean(group, codec_of("fp16"))
    mean = GradientMean(means, whole_backwards=1, scale=Fp16Scale())
    attach(model, mean)

    def check(*_: object) -> None:
        if not mean.take_finite():
            raise OverflowError("a step would have been left out: begin with a smaller scale")

    optimizer.register_step_pre_hook(check)
    return model, optimizer


def sgd(net: nn.Module, group: dist.ProcessGroup, steps: int) -> Trained:
    model = replicas(net, group)
    compress_gradients(model, GroupMean(group, codec_of("none")))
    return model, torch.optim.SGD(net.parameters(), lr=SGD_RATE, momentum=MOMENTUM)


def deep_gradient_compression(net: nn.Module, group: dist.ProcessGroup, steps: int) -> Trained:
    """Momentum on each rank before top-k, of densities that fall in the warm-up."""
    model, warmup = replicas(net, group), round(WARMUP_SHARE * steps)
    mean = GradientMean(_sparse_mean(group, DENSITIES[0]), whole_backwards=1)
    last, stage, backwards = len(DENSITIES) - 1, 0, 0

    def hook(index: int, flat: torch.Tensor) -> torch.Tensor:
        nonlocal stage, backwards
        due = min(last, backwards * last // warmup)
        if due != stage:
            stage, sparser = due, _sparse_mean(group, DENSITIES[due])
            sparser.load_state_dict(mean.means.state_dict())
            mean.means = sparser
        backwards += index == 0
        return mean(index, flat)

    attach(model, hook)
    return model, torch.optim.SGD(net.parameters(), lr=SGD_RATE)


def _sparse_mean(group: dist.ProcessGroup, density: float) -> GroupMean:
    return GroupMean(group, codec_of(f"top_k:{density}"), momentum=MOMENTUM)


def lamb(net: nn.Module, group: dist.ProcessGroup, steps: int) -> Trained:
    """LAMB is 1-bit LAMB that never ends to warm up."""
    return lamb_of(net, group, warmup=steps)


def one_bit_lamb(**options: Any) -> Make:
    def make(net: nn.Module, group: dist.ProcessGroup, steps: int) -> Trained:
        return lamb_of(net, group, warmup=round(WARMUP_SHARE * steps), **options)

    return make


def lamb_of(net: nn.Module, group: dist.ProcessGroup, *, warmup: int, **options: Any) -> Trained:
    model = replicas(net, group)
    optimizer = OneBitLamb(
        net.parameters(), lr=LAMB_RATE, warmup_steps=warmup, group=group, **options
    )
    optimizer.attach(model)
    return model, optimizer


def power_sgd(rank: int, factors: str = "none") -> Make:
    def make(net: nn.Module, group: dist.ProcessGroup, steps: int) -> Trained:
        model, warmup = replicas(net, group), round(WARMUP_SHARE * steps)
        attach_power_sgd(model, LowRankMean(group, rank, codec=factors), whole_backwards=warmup)
        return model, adam_w(net)

    return make


def power_sgd_momentum(rank: int, factors: str = "none") -> Make:
    def make(net: nn.Module, group: dist.ProcessGroup, steps: int) -> Trained:
        model, warmup = replicas(net, group), round(WARMUP_SHARE * steps)
        optimizer = PowerSgdAdam(
            net.parameters(), lr=LEARNING_RATE, rank=rank, factors=factors, warmup_steps=warmup,
            group=group,
        )  # fmt: skip
        optimizer.attach(model)
        return model, optimizer

    return make


def torch_power_sgd(rank: int) -> Make:
    """The hook that torch has."""

    def make(net: nn.Module, group: dist.ProcessGroup, steps: int) -> Trained:
        model, start = replicas(net, group), max(2, round(WARMUP_SHARE * steps))
        state = PowerSGDState(
            group, matrix_approximation_rank=rank, start_powerSGD_iter=start,
            min_compression_rate=1,
        )  # fmt: skip
        model.register_comm_hook(state, powerSGD_hook)
        return model, adam_w(net)

    return make


METHODS = {
    "adam": Method(title="AdamW", make=adam),
    "one_bit_adam": Method(title="1-bit Adam", make=momentum("one_bit")),
    "one_bit_adam_article": Method(
        title="1-bit Adam, momentum in its own units",
        make=momentum("one_bit", preconditioned=False),
    ),
    "zero_one_adam": Method(
        title="0/1 Adam, κ = 16, at most 4 steps apart", make=zero_one(longest_away=4)
    ),
    "zero_one_adam_64": Method(
        title="0/1 Adam, κ = 64, at most 4 steps apart",
        make=zero_one(variance_repeats=64, longest_away=4),
    ),
    "zero_one_adam_near": Method(
        title="0/1 Adam, κ = 64, never apart", make=zero_one(variance_repeats=64, longest_away=1)
    ),
    "power_sgd": Method(title="PowerSGD, rank 4", make=power_sgd(4)),
    "power_sgd_8": Method(title="PowerSGD, rank 8", make=power_sgd(8)),
    "power_sgd_16": Method(title="PowerSGD, rank 16", make=power_sgd(16)),
    "power_sgd_16_int8": Method(
        title="PowerSGD, rank 16, factors in int8", make=power_sgd(16, "int8:64")
    ),
    "power_sgd_momentum": Method(
        title="PowerSGD of the momentum, rank 4", make=power_sgd_momentum(4)
    ),
    "power_sgd_momentum_8": Method(
        title="PowerSGD of the momentum, rank 8", make=power_sgd_momentum(8)
    ),
    "power_sgd_momentum_16_int8": Method(
        title="PowerSGD of the momentum, rank 16, factors in int8",
        make=power_sgd_momentum(16, "int8:64"),
    ),
    "torch_power_sgd": Method(title="PowerSGD, rank 4, torch's hook", make=torch_power_sgd(4)),
    "top_k_momentum": Method(title="top-k .1 % of the momentum", make=momentum("top_k:0.001")),
    "top_k_gradients": Method(title="top-k .1 % of gradients", make=gradients("top_k:0.001")),
    "int8": Method(title="int8 gradients", make=gradients("int8")),
    "int4": Method(title="int4 gradients", make=gradients("int4")),
    "fp8": Method(title="fp8 gradients", make=gradients("fp8")),
    "fp16": Method(title="fp16 gradients", make=fp16),
    "one_bit_gradients": Method(title="1-bit gradients", make=gradients("one_bit")),
    "sgd": Method(title="SGD, momentum .9", make=sgd, rate=SGD_RATE, against="sgd"),
    "dgc": Method(
        title="Deep Gradient Compression, top-k .1 %",
        make=deep_gradient_compression,
        rate=SGD_RATE,
        against="sgd",
    ),
    "lamb": Method(title="LAMB", make=lamb, rate=LAMB_RATE, against="lamb"),
    "one_bit_lamb": Method(
        title="1-bit LAMB", make=one_bit_lamb(), rate=LAMB_RATE, against="lamb"
    ),
    "one_bit_lamb_frozen": Method(
        title="1-bit LAMB, coefficients never corrected",
        make=one_bit_lamb(factors=(1.0, 1.0)),
        rate=LAMB_RATE,
        against="lamb",
    ),
}
