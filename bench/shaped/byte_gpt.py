"""A GPT over bytes that also looks up the hashed three to eight bytes up to each in tables.

Ten million parameters, two thirds of them in tables. Byte-level models widen what a position sees
so (Pagnoni et al. 2024, Byte Latent Transformer, arXiv 2412.09871, section 3.2.1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

BYTES = 256
FACTORS = (31, 7919, 104729, 1299709, 15485863, 179424673, 2038074743)
"""Primes, for the hash of each byte before the own one."""

SHORTEST = 3
"""Bytes of the shortest run that has a table."""


@dataclass
class Config:
    context: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 256
    rows: int = 4349


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class ByteGPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.rows = config.rows
        self.own = nn.Embedding(BYTES, config.width)
        self.places = nn.Embedding(config.context, config.width)
        runs = range(SHORTEST, len(FACTORS) + 2)
        self.tables = nn.ModuleList(nn.Embedding(config.rows, config.width) for _ in runs)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, BYTES, bias=False)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.own(idx) + self.places(torch.arange(idx.size(1), device=idx.device))
        hashed = idx
        for distance, factor in enumerate(FACTORS, 1):
            hashed = hashed + F.pad(idx, (distance, 0))[:, : idx.size(1)] * factor
            if distance + 1 >= SHORTEST:
                x = x + self.tables[distance + 1 - SHORTEST](hashed % self.rows)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, BYTES), targets.view(-1))
