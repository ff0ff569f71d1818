"""Models whose blocks are unlike each other, for docs/samplers.md.

`Levels` is U-Net-like: convolutions that halve the image and double the channels, then turn back
(without the skips, which cross every cut). `TwoParts` is T5-like: thin blocks over a long
sequence, then wide ones over a short one. `Vit` is a plain vision transformer.
"""

from __future__ import annotations

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


class Block(nn.Module):
    """A transformer block of torch's parts, without a mask; `pools` thins the sequence out."""

    def __init__(self, width: int, heads: int, wide: int, pools: int = 1) -> None:
        super().__init__()
        self.heads, self.pools = heads, pools
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, wide), nn.Linear(wide, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        if self.pools > 1:
            x = x.view(batch, length // self.pools, self.pools, width).mean(2)
        return x


class Vit(nn.Module):
    """Patches of 16 x 16, blocks, the mean's class."""

    def __init__(self, layers: int, width: int, heads: int, classes: int = 1000) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.blocks = nn.ModuleList(Block(width, heads, 4 * width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x.mean(1))), label)


class TwoParts(nn.Module):
    """Half the blocks over all tokens, half of them wider over an eighth."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int = 32128) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        half = layers // 2
        self.blocks = nn.ModuleList(
            Block(width, heads, (2 if index < half else 16) * width, 8 if index == half - 1 else 1)
            for index in range(layers)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Level(nn.Module):
    """Two convolutions with a residual; the first may change size and channels."""

    def __init__(self, before: int, after: int, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.first = nn.Conv2d(before, after, 3, padding=1)
        self.second = nn.Conv2d(after, after, 3, padding=1)
        self.norm = nn.GroupNorm(8, after)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale != 1.0:
            x = F.interpolate(x, scale_factor=self.scale)
        x = self.first(x)
        return x + self.second(F.silu(self.norm(x)))


class Levels(nn.Module):
    """`each` blocks at every resolution, down and up again."""

    def __init__(self, each: int, width: int, depth: int = 3) -> None:
        super().__init__()
        sizes = [width * 2**level for level in (*range(depth), *reversed(range(depth - 1)))]
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        blocks, before = [], width
        for number, size in enumerate(sizes):
            scale = 0.5 if 0 < number < depth else 2.0 if number >= depth else 1.0
            blocks += [
                Level(before if index == 0 else size, size, scale if index == 0 else 1.0)
                for index in range(each)
            ]
            before = size
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        x = self.stem(image)
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x), target)
