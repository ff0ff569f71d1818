"""A bucket's bits to 64-bit sums that tell whether, and between which ranks, it was changed.

Networks repeat what gets lost or garbled; what remains is silent: bits that flip in a card's
memory, a broken kernel, ranks that disagree. All checks are sums of integers modulo 2^64:

- `CheckedExchange` makes two sums of each message, of all words and of weighted blocks of words,
  where it leaves and where it arrives, and folds them into one pair a sender and receiver;
  `report` compares these once a step. A changed word always changes the first sum; several changed
  ones leave both as they were once in 2^64, were changes random. Nothing is sent in between, where
  on a network of milliseconds each round of a ring would wait for it.
- `agree` compares what all ranks hold after a collective of the backend's, whose messages nobody
  sees: results are equal to the bit. What was changed before it was added in is not seen so.

The first sum of a sum of 64-bit integers is the sum of theirs (Huang and Abraham, IEEE Trans.
Computers C-33, 1984). Floating-point sums round, so there it does not hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from claw_plan.executor.communication.algorithms import NATIVE, Exchange, all_reduce, exchange
from claw_plan.executor.errors import ExecutionError
from claw_plan.profiles.collective_schedules import Nodes

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


def agree(flat: Tensor, group: dist.ProcessGroup, what: str) -> None:
    """All ranks hold the same bits; else each raises ExecutionError that names who differs."""
    found = gather_checksums(checksum(flat), group)
    wrong = outvoted(found)
    if wrong:
        raise ExecutionError(_accusation(wrong, group, f"{what} differs from that of the others"))


def checked_all_reduce(
    flat: Tensor,
    group: dist.ProcessGroup,
    algorithm: str,
    nodes: Nodes | None = None,
    carry: Exchange = exchange,
) -> None:
    """As `all_reduce`, and then `report`; of the backend's own collective `agree`.

    `carry` moves the messages. Raises ExecutionError on all ranks alike.
    """
    if algorithm == NATIVE:
        dist.all_reduce(flat, group=group)
        agree(flat, group, "the sum")
        return
    checked = CheckedExchange(group, flat.device, carry)
    all_reduce(flat, group, algorithm, nodes, checked)
    checked.report()


class CheckedExchange:
    """Moves messages as `exchange` does and remembers their checksums.

    `all_reduce(…, carry=checked)` for every bucket of a step, then `checked.report()`.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, carry: Exchange = exchange
    ) -> None:
        self._group, self._carry = group, carry
        self._sent = torch.zeros(group.size(), 2, dtype=torch.int64, device=device)
        self._came = torch.zeros_like(self._sent)

    def __call__(
        self,
        sent: Sequence[Tensor],
        target: int,
        received: Sequence[Tensor],
        source: int,
        group: dist.ProcessGroup,
    ) -> None:
        """Messages out and in."""
        for message in sent:
            if message.numel():
                _fold(self._sent[target], message)
        self._carry(sent, target, received, source, group)
        for message in received:
            if message.numel():
                _fold(self._came[source], message)

    def report(self) -> None:
        """Raises ExecutionError on all ranks if a message of any since the last was changed."""
        size = self._group.size()
        found = gather_checksums(torch.stack([self._sent, self._came]).flatten(), self._group)
        self._sent.zero_()
        self._came.zero_()
        told = torch.tensor(found).view(size, 2, size, 2)  # rank, sent or came, peer, sums
        differ = (told[:, 0] != told[:, 1].transpose(0, 1)).any(-1)
        if differ.any():
            world = dist.get_process_group_ranks(self._group)
            ways = [f"from rank {world[a]} to rank {world[b]}" for a, b in differ.nonzero()]
            raise ExecutionError(
                f"bits changed on the way {' and '.join(ways)}: a card or its memory is broken; "
                "leave that host out, and resume from the last checkpoint"
            )


def _fold(sums: Tensor, message: Tensor) -> None:
    """Takes the message's sums up in what is remembered; on a GPU without waiting for it."""
    sums.mul_(FOLD).add_(checksum(message))


def gather_checksums(own: Tensor, group: dist.ProcessGroup) -> list[tuple[int, ...]]:
    """Every rank's."""
    found = own.new_empty(group.size() * own.numel())
    dist.all_gather_single(found, own.contiguous(), group=group)
    return [tuple(row) for row in found.view(group.size(), -1).tolist()]


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


def _accusation(ranks: Sequence[int], group: dist.ProcessGroup, what: str) -> str:
    world = dist.get_process_group_ranks(group)
    if len(ranks) == group.size():
        who = "all ranks differ"
    else:
        who = f"rank {', '.join(str(world[rank]) for rank in ranks)}"
    return f"{who}: {what}; its memory or its card changed bits: resume from the last checkpoint"
