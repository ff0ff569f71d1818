"""Where each rank's tokens lie, and the collectives between ranks that hold parts of a sequence.

A dimension divided over `degree` ranks consists of pieces, each cut into `degree` chunks; a rank
holds its chunk of every piece. Where they are *mirrored*, ranks count backwards in every odd
piece: of two pieces rank r has chunks r and 2 degree - 1 - r of the sequence, so that causal
attention is the same work on all ranks (Llama 3, arXiv 2407.21783, section 3.3.2).

On the wire the rank is the first dimension. Every collective stands beside its derivative, for a
loss that all ranks compute alike and whose gradients are averaged over the ranks: a sum's
derivative is the sum of the gradients, a gather's the scattered sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

Exchanged = Callable[[str, int], None]
"""Called with the collective's name and the bytes of its full buffer."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """How many a dimension consists of, and whether ranks count backwards in the odd ones."""

    number: int
    mirrored: bool

    def in_order(self, cut: torch.Tensor, dim: int) -> torch.Tensor:
        """[.., pieces, ranks, ..]: chunks by rank to chunks by place, and back again."""
        if not self.mirrored:
            return cut
        even, odd = cut.unflatten(dim, (-1, 2)).unbind(dim + 1)
        return torch.stack((even, odd.flip(dim + 1)), dim + 1).flatten(dim, dim + 1)


ONE_RUN = Pieces(1, False)


class ContextRanks(Protocol):
    """The ranks that share a sequence."""

    degree: int
    rank: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, a new tensor."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[ranks, ...]: the tensors of all ranks."""

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """[ranks, ...] to [...]: the sum over the ranks of what is for this one."""

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """[ranks, ...]: what each rank has for this one."""


class ContextStandIn:
    """One rank without the others: results have the right shape, each collective is reported."""

    def __init__(self, degree: int, rank: int = 0, exchange: Exchanged | None = None) -> None:
        self.degree, self.rank, self._exchange = degree, rank, exchange

    def _report(self, op: str, full_bytes: int) -> None:
        if self._exchange is not None:
            self._exchange(op, full_bytes)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor again."""
        self._report("all_reduce", tensor.nbytes)
        return tensor.clone()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """An empty tensor for all ranks."""
        self._report("all_gather", self.degree * tensor.nbytes)
        return tensor.new_empty((self.degree, *tensor.shape))

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """An empty tensor for one rank."""
        self._report("reduce_scatter", tensor.nbytes)
        return tensor.new_empty(tensor.shape[1:])

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """As much arrives as leaves."""
        self._report("all_to_all", tensor.nbytes)
        return torch.empty_like(tensor)


class ContextGroup:
    """The ranks of a torch.distributed process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.degree, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Leaves what it is given as it was."""
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self._group)
        return total

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """One buffer for all ranks."""
        own = tensor.contiguous().reshape(1, -1)
        buffer = own.new_empty((self.degree, own.shape[1]))
        _all_gather(buffer, own, group=self._group)
        return buffer.view(self.degree, *tensor.shape)

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums in rank order."""
        rows = tensor.contiguous().view(self.degree, -1)
        own = rows.new_empty((1, rows.shape[1]))
        _reduce_scatter(own, rows, group=self._group)
        return own.view(tensor.shape[1:])

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """One buffer in, one out."""
        sent = tensor.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return received


# torch 2.13 renamed both and warns about the old names, which are all that 2.11 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def by_rank(whole: torch.Tensor, dim: int, pieces: Pieces, degree: int) -> torch.Tensor:
    """[ranks, ...]: for each rank its chunks of `dim`, one behind the other."""
    dim = dim % whole.ndim
    cut = pieces.in_order(torch.unflatten(whole, dim, (pieces.number, degree, -1)), dim)
    return cut.movedim(dim + 1, 0).flatten(dim + 1, dim + 2)


def from_ranks(shards: torch.Tensor, dim: int, pieces: Pieces) -> torch.Tensor:
    """The inverse of `by_rank`; `dim` is the whole's."""
    dim = dim % (shards.ndim - 1)
    cut = torch.unflatten(shards, dim + 1, (pieces.number, -1)).movedim(0, dim + 1)
    return pieces.in_order(cut, dim).flatten(dim, dim + 2)


def own_chunks(whole: torch.Tensor, dim: int, pieces: Pieces, ranks: ContextRanks) -> torch.Tensor:
    """This rank's chunks of `dim`, one behind the other; a view where that is one run."""
    dim, degree, rank = dim % whole.ndim, ranks.degree, ranks.rank
    if not pieces.mirrored:
        chunks = torch.unflatten(whole, dim, (pieces.number, degree, -1))
        return chunks.select(dim + 1, rank).flatten(dim, dim + 1)
    chunks = torch.unflatten(
        whole, dim, (-1, 2, degree, whole.shape[dim] // pieces.number // degree)
    )
    even = chunks.select(dim + 1, 0).select(dim + 1, rank)
    odd = chunks.select(dim + 1, 1).select(dim + 1, degree - 1 - rank)
    return torch.stack((even, odd), dim + 1).flatten(dim, dim + 2)


Exchange = Callable[[torch.Tensor], torch.Tensor]


class _Exchanged(torch.autograd.Function):
    """One exchange forward, and the one that is its transpose backward."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, exchange: Exchange, transpose: Exchange
    ) -> torch.Tensor:
        ctx.transpose = transpose
        return exchange(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.transpose(gradient), None, None


def _exchanged(tensor: torch.Tensor, exchange: Exchange, transpose: Exchange) -> torch.Tensor:
    result: torch.Tensor = _Exchanged.apply(  # type: ignore[no-untyped-call]
        tensor, exchange, transpose
    )
    return result


def total(tensor: torch.Tensor, ranks: ContextRanks) -> torch.Tensor:
    """The sum over the ranks; backward the sum of the gradients."""
    return _exchanged(tensor, ranks.all_reduce, ranks.all_reduce)


def gather(tensor: torch.Tensor, dim: int, pieces: Pieces, ranks: ContextRanks) -> torch.Tensor:
    """The whole of a divided dimension; backward each rank gets the sum of its chunks."""
    shards = _exchanged(tensor, ranks.all_gather, ranks.reduce_scatter)
    return from_ranks(shards, dim, pieces)


def swap(tensor: torch.Tensor, cut: int, joined: int, ranks: ContextRanks) -> torch.Tensor:
    """Divides dimension `cut`, which is whole, and joins `joined`, which holds one run a rank."""
    sent = by_rank(tensor, cut, ONE_RUN, ranks.degree)
    received = _exchanged(sent, ranks.all_to_all, ranks.all_to_all)
    return from_ranks(received, joined, ONE_RUN)
