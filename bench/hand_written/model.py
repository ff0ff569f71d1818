"""The model that both sides train: separate projections, untied head, the loss inside."""

from __future__ import annotations

import os

import torch
import torch.nn as nn
import torch.nn.functional as F

WIDTH = int(os.environ.get("BENCH_WIDTH", "384"))
LENGTH = int(os.environ.get("BENCH_LENGTH", "128"))
VOCABULARY, LAYERS, HEAD = 1024, 4, WIDTH // 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in "qkvo")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            linear(x).view(batch, length, -1, HEAD).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))


def build_model() -> nn.Module:
    return Model()


def example_batch(batch_size: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, VOCABULARY, (batch_size, LENGTH + 1))
    return {"ids": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
