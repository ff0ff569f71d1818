"""Modules of experts, and some that only look like ones, for the tests of how they are found."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

HIDDEN, INNER = 16, 20


class Fused(nn.Module):
    """Gate and up side by side in one tensor."""

    def __init__(self, experts: int = 6) -> None:
        super().__init__()
        self.number = experts
        self.up = nn.Parameter(torch.randn(experts, 2 * INNER, HIDDEN))
        self.down = nn.Parameter(torch.randn(experts, HIDDEN, INNER))

    def act(self, rows: torch.Tensor) -> torch.Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return F.silu(gate) * up

    def forward(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(self.number):
            share = (weights * (index == expert)).sum(-1, keepdim=True)
            out = out + share * F.linear(
                self.act(F.linear(hidden, self.up[expert])), self.down[expert]
            )
        return out


class Interleaved(Fused):
    """Gate and up take turns."""

    def act(self, rows: torch.Tensor) -> torch.Tensor:
        return F.silu(rows[..., ::2]) * rows[..., 1::2]


class WeightedInside(Fused):
    """The weight goes in before the nonlinearity, so it cannot be applied afterwards."""

    def forward(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(self.number):
            share = (weights * (index == expert)).sum(-1, keepdim=True)
            out = out + F.linear(
                self.act(F.linear(share * hidden, self.up[expert])), self.down[expert]
            )
        return out


class Listed(nn.Module):
    """One module for each."""

    def __init__(self, experts: int = 6) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(experts))

    def forward(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for number in range(len(self.each)):
            tokens, place = torch.where(index == number)
            made = self.each[number](hidden[tokens]) * weights[tokens, place, None]
            out = out.index_add(0, tokens, made)
        return out


class Convolved(nn.Module):
    """A convolution's weight has three dimensions too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(HIDDEN, HIDDEN, 1)

    def forward(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return self.inner(hidden.T).T


class RoutingItself(nn.Module):
    """Calls the modules of its list one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 4)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        odds = self.gate(hidden).softmax(-1)
        return torch.stack(
            [expert(hidden) * odds[:, i, None] for i, expert in enumerate(self.experts)]
        ).sum(0)


class Block(nn.Module):
    """A router before the module."""

    def __init__(self, inner: nn.Module, experts: int = 6, *, by_name: bool = False) -> None:
        super().__init__()
        self.router, self.inner, self.by_name = nn.Linear(HIDDEN, experts), inner, by_name

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, index = self.router(hidden).softmax(-1).topk(2)
        if self.by_name:
            return self.inner(weights=weights, hidden=hidden, index=index)
        return self.inner(hidden, index, weights)


class Model(nn.Module):
    """One such block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.block(hidden)
