"""The GPT of gpt.py with about 10 million parameters, over the bytes of a text file."""

from __future__ import annotations

import torch
import torch.nn as nn
from gpt import GPT, GPTConfig

SMALL = GPTConfig(vocab_size=256, block_size=128, n_layer=6, n_head=6, n_embd=372)


def build_model() -> nn.Module:
    return GPT(SMALL)


def example_batch(batch_size: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, SMALL.vocab_size, (batch_size, SMALL.block_size + 1))
    return {"idx": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
