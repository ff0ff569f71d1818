"""Small mixtures of experts: their weights in common tensors, or a list of modules; 4 blocks.

The loss has the load-balancing part of Switch Transformers (Fedus et al. 2021, arXiv 2101.03961,
section 2.2), so a router that is averaged wrongly is seen.
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCABULARY, LENGTH, HIDDEN, INNER = 61, 12, 16, 20


class Fused(nn.Module):
    """All experts in two tensors."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.number = experts
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * INNER, HIDDEN) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(experts, HIDDEN, INNER) / INNER**0.5)

    def forward(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        # The rows of one expert at a time, by a mask: no sizes that depend on values.
        for expert in range(self.number):
            share = (weights * (index == expert)).sum(-1, keepdim=True)
            gate, up = F.linear(hidden, self.gate_up[expert]).chunk(2, dim=-1)
            out = out + share * F.linear(F.silu(gate) * up, self.down[expert])
        return out


class Listed(nn.Module):
    """One module for each expert; an expert without tokens is left out."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.each = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, INNER), nn.GELU(), nn.Linear(INNER, HIDDEN))
            for _ in range(experts)
        )

    def forward(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for number in range(len(self.each)):
            tokens, place = torch.where(index == number)
            if len(tokens):
                made = self.each[number](hidden[tokens]) * weights[tokens, place, None]
                out = out.index_add(0, tokens, made)
        return out


class Block(nn.Module):
    """Attention without heads, then experts.

    A `skewed` router sends every token to the same two experts, a `balanced` one takes turns.
    """

    def __init__(self, kind: type[nn.Module], experts: int, skewed: bool, balanced: bool) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN)
        self.router = nn.Linear(HIDDEN, experts, bias=skewed)
        if skewed:
            with torch.no_grad():
                self.router.bias.copy_(torch.arange(experts) * 50.0)
        self.experts = kind(experts)
        self.number, self.balanced = experts, balanced

    def forward(
        self, hidden: torch.Tensor, balance: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = self.qkv(self.norm(hidden)).chunk(3, dim=-1)
        hidden = hidden + F.scaled_dot_product_attention(query, key, value, is_causal=True)
        tokens = hidden.flatten(0, 1)
        odds = self.router(tokens).softmax(-1)
        weights, index = odds.topk(2)
        if self.balanced:
            index = torch.arange(index.numel(), device=index.device).view_as(index) % self.number
            weights = odds.gather(1, index)
        used = F.one_hot(index, self.number).to(odds.dtype).sum(1).mean(0)
        balance = balance + self.number * (used * odds.mean(0)).sum()
        return hidden + self.experts(tokens, index, weights).view_as(hidden), balance


class Mixture(nn.Module):
    """A language model."""

    def __init__(
        self,
        kind: type[nn.Module],
        experts: int = 4,
        skewed: bool = False,
        balanced: bool = False,
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block(kind, experts, skewed, balanced) for _ in range(4))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.table(ids)
        balance = hidden.new_zeros(())
        for block in self.blocks:
            hidden, balance = block(hidden, balance)
        scores = self.head(hidden[:, :-1]).flatten(0, 1)
        return F.cross_entropy(scores, ids[:, 1:].flatten()) + 0.1 * balance
