"""A stack of residual blocks in variants, each a trap for something that traces models."""

import torch
import torch.nn as nn


class Block(nn.Module):
    def __init__(self, dim: int, rate: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.dropout(torch.relu(self.up(self.norm(x))), self.rate, self.training)
        return x + self.down(y)


class Stack(nn.Module):
    def __init__(self, layers: int = 4, dim: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class Skipping(Stack):
    """The first block's output is added after the third."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.blocks[0](x)
        for block in list(self.blocks)[1:3]:
            x = block(x)
        x = self.blocks[3](x + first)
        return self.head(x).square().mean()


class Counting(Stack):
    """The forward relies on its number of blocks, which a shortened model does not have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(8):
            x = self.blocks[index](x)
        return self.head(x).square().mean()


class Alternating(Stack):
    """Every other block gets its input twice as large, without an attribute that says so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = block(torch.cat([x, x]))[: len(x)] if index % 2 else block(x)
        return self.head(x).square().mean()


class Shared(Stack):
    """One block runs four times: no chain."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = self.blocks[0](x)
        return self.head(self.blocks[1](x)).square().mean()


class Undecided(Stack):
    """Goes on by value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        if x.sum() > 1e9:
            x = self.blocks[1](x)
        return self.head(x).square().mean()


class Growing(Stack):
    """Runs one block more for each sample."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in list(self.blocks)[: len(x)]:
            x = block(x)
        return self.head(x).square().mean()


class Untrained(Stack):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Pairwise(Stack):
    """A loss over all pairs of samples, as contrastive training has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x @ x.t()).square().mean()


class Dropping(Stack):
    """Reads values while it is built, as models with stochastic depth do."""

    def __init__(self) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.5, 4)]
        self.blocks = nn.ModuleList(Block(16, rate) for rate in rates)


class Frozen(Stack):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks[:2]:
            block.requires_grad_(False)


class Recurrent(Stack):
    def __init__(self) -> None:
        super().__init__(2)
        self.lstm = nn.LSTM(16, 16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.lstm(x.unsqueeze(1).expand(-1, 6, -1))[0].mean(1))


class Scattered(Stack):
    """Each sample goes to the block its own values choose."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x[:, 0] > 0).nonzero()[:, 0]
        return self.head(self.blocks[0](x[chosen])).square().sum()


class Raising(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.view(3, -1, 7))


def example_batch(batch_size: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(batch_size, 16)}
