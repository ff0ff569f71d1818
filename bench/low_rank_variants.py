"""Why PowerSGD under AdamW loses what it loses: ways to send thin matrices, tried side by side.

The network, text, batches and rates of convergence.py, its four ranks played by one process: each
rank has copies of all parameters of its own, so one batched backward gives four gradients. What
ranks would all-reduce is summed here; losses are those of real ranks but for rounding. All ways
begin from one state after 15 % of whole gradients.

    gradients      PowerSGD with error feedback, second moments of what arrives, or kept
    momentum       1-bit Adam's scheme: m + e is sent, what arrives becomes m
    differences    EF21's: each rank's momentum less the common one is sent, and added to it

`kept` is the share of |M|² that arrived at once, `best` what any matrix of that rank could keep.

Run: OMP_NUM_THREADS=1 python bench/low_rank_variants.py [--steps 1000] [--seed 0] [--only NAME,..]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from convergence import (
    EVALUATION_EVERY,
    EVALUATION_ROWS,
    EVALUATIONS,
    GPT,
    RANKS,
    ROWS,
    SEQ_LEN,
    GPTConfig,
    Text,
    rate_at,
    read_text,
    rows_of,
)
from convergence_methods import LEARNING_RATE, WARMUP_SHARE
from torch import Tensor

from claw_plan.kernels.low_rank import back_project, first_factor, orthonormal, product, project
from claw_plan.profiles.codecs import pays

BETA2, EPS, DECAY, HEADS = 0.999, 1e-8, 0.01, 4

Tensors = dict[str, Tensor]


def loss_of(held: Mapping[str, Tensor], indices: Tensor, targets: Tensor) -> Tensor:
    """The sum of all ranks' losses; every tensor has its ranks first."""
    ranks, rows, length = indices.shape
    table = held["transformer.wte.weight"]
    vocab, width = table.shape[1:]
    offset = (torch.arange(ranks) * vocab).view(ranks, 1, 1)
    x = F.embedding(indices + offset, table.reshape(-1, width))
    x = (x + held["transformer.wpe.weight"].unsqueeze(1)).view(ranks, rows * length, width)
    for block in range(2):
        name = f"transformer.h.{block}."
        qkv = _linear(held, f"{name}attn.c_attn", _norm(held, f"{name}ln_1", x))
        qkv = qkv.view(ranks * rows, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        y = y.transpose(1, 2).reshape(ranks, rows * length, width)
        x = x + _linear(held, f"{name}attn.c_proj", y)
        y = F.gelu(_linear(held, f"{name}mlp.c_fc", _norm(held, f"{name}ln_2", x)))
        x = x + _linear(held, f"{name}mlp.c_proj", y)
    logits = torch.bmm(_norm(held, "transformer.ln_f", x), table.mT)
    total = F.cross_entropy(logits.reshape(-1, vocab), targets.reshape(-1), reduction="sum")
    return total / (rows * length)


def _linear(held: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return torch.baddbmm(held[f"{name}.bias"].unsqueeze(1), x, held[f"{name}.weight"].mT)


def _norm(held: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    scale, shift = held[f"{name}.weight"].unsqueeze(1), held[f"{name}.bias"].unsqueeze(1)
    return F.layer_norm(x, x.shape[-1:]) * scale + shift


@dataclass(kw_only=True)
class State:
    """A training so far: parameters, AdamW's moments, and where each rank is in the text."""

    parameters: Tensors
    first: Tensors
    second: Tensors
    generators: list[torch.Generator]

    def gradients(self, text: Text) -> Tensors:
        """Of every rank on its next samples."""
        batches = [rows_of(text.train, ROWS, generator) for generator in self.generators]
        held = {
            name: torch.stack([parameter] * RANKS).requires_grad_()
            for name, parameter in self.parameters.items()
        }
        loss_of(held, *map(torch.stack, zip(*batches, strict=True))).backward()
        return {name: copies.grad for name, copies in held.items() if copies.grad is not None}

    @torch.no_grad()
    def validation_loss(self, text: Text) -> float:
        """As of convergence.py."""
        generators = [torch.Generator().manual_seed(99 + rank) for rank in range(RANKS)]
        batches = [rows_of(text.validation, EVALUATION_ROWS, one) for one in generators]
        held = {name: torch.stack([one] * RANKS) for name, one in self.parameters.items()}
        return loss_of(held, *map(torch.stack, zip(*batches, strict=True))).item() / RANKS

    def renew(self, name: str, mean: Tensor) -> None:
        """The second moments, of one more gradient."""
        self.second[name].mul_(BETA2).addcmul_(mean, mean, value=1 - BETA2)

    def move(self, name: str, step: Tensor, rate: float, beta1: float, count: int) -> None:
        """One step of AdamW."""
        self.parameters[name].mul_(1 - rate * DECAY)
        self.parameters[name].sub_(step, alpha=rate / (1 - beta1**count))


@dataclass(kw_only=True)
class Way:
    """One way to send; `whole` is the momentum with nothing left out."""

    sends: str
    rank: int
    beta1: float = 0.9
    in_steps: bool = False
    """In units of the step, m / (√v + ε)."""
    renews: bool = False
    """Second moments of what arrives, else those of the warm-up."""
    draws_anew: bool = False
    """A new Q at every step, else the last one."""
    kept: list[float] = field(default_factory=list)
    best: list[float] = field(default_factory=list)
    left: Tensors = field(default_factory=dict)
    factors: Tensors = field(default_factory=dict)
    own: Tensors = field(default_factory=dict)

    def step(self, state: State, gradients: Tensors, rate: float, count: int, warm: int) -> None:
        """One step of all ranks."""
        for name, own in gradients.items():
            renewed = count if self.renews else warm
            root = (state.second[name] / (1 - BETA2**renewed)).sqrt() + EPS
            scale = 1 / root if self.in_steps else torch.ones(())
            momentum = state.first[name]
            getattr(self, f"_{self.sends}")(state, name, own, momentum, scale, count)
            if self.renews:
                root = (state.second[name] / (1 - BETA2**count)).sqrt() + EPS
            state.move(name, momentum / root, rate, self.beta1, count)

    def _gradients(self, state: State, name: str, own: Tensor, momentum: Tensor, scale: Tensor,
                   count: int) -> None:  # fmt: skip
        sent = own * scale + self.left.get(name, 0)
        mean, came = self._mean(name, sent, count)
        self.left[name] = sent - came
        momentum.lerp_(mean / scale, 1 - self.beta1)
        if self.renews:
            state.renew(name, mean / scale)

    def _momentum(self, state: State, name: str, own: Tensor, momentum: Tensor, scale: Tensor,
                  count: int) -> None:  # fmt: skip
        sent = momentum.lerp(own, 1 - self.beta1) * scale + self.left.get(name, 0)
        mean, came = self._mean(name, sent, count)
        self.left[name] = sent - came
        momentum.copy_(mean / scale)

    def _differences(self, state: State, name: str, own: Tensor, momentum: Tensor, scale: Tensor,
                     count: int) -> None:  # fmt: skip
        ranks = self.own.setdefault(name, torch.stack([momentum] * RANKS))
        ranks.lerp_(own, 1 - self.beta1)
        mean, _ = self._mean(name, (ranks - momentum) * scale, count)
        momentum.add_(mean / scale)

    def _mean(self, name: str, sent: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """What arrives of the mean, and of each rank's own."""
        mean = sent.mean(0)
        if mean.dim() < 2 or not pays((mean.shape[0], mean.shape[1]), self.rank):
            return mean, sent
        right = self.factors.get(name)
        if right is None or self.draws_anew:
            right = first_factor((mean.shape[0], mean.shape[1]), self.rank, count, mean)
        basis = orthonormal(project(mean, right))
        right = self.factors[name] = back_project(mean, basis)
        arrived = product(basis, right)
        if count % 100 == 0:
            squares = torch.linalg.svdvals(mean) ** 2
            self.kept.append((arrived.norm() ** 2 / mean.norm() ** 2).item())
            self.best.append((squares[: self.rank].sum() / squares.sum()).item())
        return arrived, basis @ (basis.mT @ sent)


MOST = 64
"""A rank at which nothing is left out."""

WAYS: Mapping[str, Callable[[], Way]] = {
    "whole": partial(Way, sends="momentum", rank=MOST),
    "gradients_4": partial(Way, sends="gradients", rank=4, renews=True),
    "gradients_4_kept": partial(Way, sends="gradients", rank=4),
    "momentum_4": partial(Way, sends="momentum", rank=4),
    "momentum_4_steps": partial(Way, sends="momentum", rank=4, in_steps=True),
    "differences_4": partial(Way, sends="differences", rank=4),
    "differences_4_steps": partial(Way, sends="differences", rank=4, in_steps=True),
    "differences_4_beta": partial(Way, sends="differences", rank=4, beta1=0.7),
    "differences_4_anew": partial(Way, sends="differences", rank=4, draws_anew=True),
    "differences_8": partial(Way, sends="differences", rank=8),
    "differences_16_beta": partial(Way, sends="differences", rank=16, beta1=0.8),
    "gradients_16": partial(Way, sends="gradients", rank=16, renews=True),
}


def warmed(seed: int, steps: int, text: Text) -> State:
    """AdamW with whole gradients for its share of the steps."""
    torch.manual_seed(seed)
    config = GPTConfig(text.alphabet, SEQ_LEN, n_layer=2, n_head=HEADS, n_embd=64)
    start = {name: one.detach().clone() for name, one in GPT(config).named_parameters()}
    state = State(
        parameters=start,
        first={name: torch.zeros_like(one) for name, one in start.items()},
        second={name: torch.zeros_like(one) for name, one in start.items()},
        generators=[torch.Generator().manual_seed(1000 * seed + rank) for rank in range(RANKS)],
    )
    for count in range(1, round(WARMUP_SHARE * steps) + 1):
        for name, own in state.gradients(text).items():
            mean = own.mean(0)
            state.first[name].lerp_(mean, 0.1)
            state.renew(name, mean)
            root = (state.second[name] / (1 - BETA2**count)).sqrt() + EPS
            step = state.first[name] / root
            state.move(name, step, rate_at(count, steps, LEARNING_RATE), 0.9, count)
    return state


def train(way: Way, seed: int, steps: int, text: Text) -> float:
    """The loss at the end."""
    state, losses = warmed(seed, steps, text), []
    warm = round(WARMUP_SHARE * steps)
    for count in range(warm + 1, steps + 1):
        gradients = state.gradients(text)
        way.step(state, gradients, rate_at(count, steps, LEARNING_RATE), count, warm)
        if count > steps - EVALUATIONS * EVALUATION_EVERY and not (steps - count) % 20:
            losses.append(state.validation_loss(text))
    return statistics.mean(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(WAYS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    text, whole = read_text(), None
    for name in options.only.split(","):
        way = WAYS[name]()
        loss = train(way, options.seed, options.steps, text)
        whole = whole or loss
        share = ""
        if way.kept:
            share = f"kept {statistics.mean(way.kept):.2f} of {statistics.mean(way.best):.2f}"
        print(f"{name}: {loss:.4f} ({loss / whole - 1:+.1%}) {share}", flush=True)


if __name__ == "__main__":
    main()
