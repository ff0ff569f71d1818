"""A tensor's bits to two 64-bit sums that any flipped bit changes.

Networks repeat what gets lost or garbled; what remains is silent: bits that flip in a card's
memory, a broken kernel, ranks that disagree. `bucket_checks` compares these sums between ranks.
All are sums of integers modulo 2^64: a changed word always changes the first; several changed
ones leave both as they were once in 2^64, were changes random.

The first sum of a sum of 64-bit integers is the sum of theirs (Huang and Abraham, IEEE Trans.
Computers C-33, 1984). Floating-point sums round, so there it does not hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WORD_BYTES = 8
BLOCK_WORDS = 1 << 15
"""Words under one weight: the sums of blocks are weighted, not words, which costs nothing."""

FOLD = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 over the golden ratio, as a signed number. Odd, so that no earlier message is forgotten."""


def checksum(flat: Tensor) -> Tensor:
    """Two 64-bit sums of a contiguous tensor's bits, on its device.

    The first is of all words, the second of the blocks' sums times odd weights that differ.
    """
    words, rest = _words(flat)
    whole = words.numel() // BLOCK_WORDS * BLOCK_WORDS
    blocks = words[:whole].view(-1, BLOCK_WORDS).sum(1)
    last = words[whole:].sum() + rest
    sums = torch.cat([blocks, last.view(1)])
    weights = 2 * torch.arange(len(sums), device=flat.device) + 1
    return torch.stack([sums.sum(), (sums * weights).sum()])


def fold(sums: Tensor, message: Tensor) -> None:
    """Takes the message's sums up in what is remembered; on a GPU without waiting for it."""
    sums.mul_(FOLD).add_(checksum(message))


def outvoted(found: Sequence[tuple[int, ...]]) -> list[int]:
    """Ranks whose checksum is not that of most; all where no value has a majority."""
    counts = {value: found.count(value) for value in found}
    most = max(counts, key=lambda value: counts[value])
    if counts[most] == len(found):
        return []
    if 2 * counts[most] <= len(found):
        return list(range(len(found)))
    return [rank for rank, value in enumerate(found) if value != most]


def _words(flat: Tensor) -> tuple[Tensor, Tensor]:
    """The tensor as 64-bit words, and its last bytes as one."""
    codes = flat.detach().reshape(-1).view(torch.uint8)
    whole = codes.numel() // WORD_BYTES * WORD_BYTES
    if codes.storage_offset() % WORD_BYTES:
        codes = codes.clone()
    rest = torch.zeros(WORD_BYTES, dtype=torch.uint8, device=codes.device)
    rest[: codes.numel() - whole] = codes[whole:]
    return codes[:whole].view(torch.int64), rest.view(torch.int64)[0]
