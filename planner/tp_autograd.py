"""The collectives of tensor parallelism with their derivatives, with a process group or without.

A `Communicator` moves the bytes: `OverProcessGroup` when training, `StandIn` when planning, which
gives results of the right shapes and reports each collective in execution order. The functions
below pair each collective of the forward pass with the one of the backward pass, after Korthikanti
et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198, fig. 5):
`enter` is its f, `reduce` its f-bar, `gather_sequence` its g and `reduce_scatter_sequence` its
g-bar. Hidden states are [batch, sequence, ...], so the sequence is dimension 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from claw_plan.planner.errors import PlanError

SEQUENCE_DIM = 1

Exchanged = Callable[[str, int, str], None]
"""Called with the collective's name, the bytes of its full buffer and the module it serves."""


class Communicator(Protocol):
    """The ranks that share a divided weight. `where` names the module a collective serves."""

    degree: int
    rank: int

    def all_reduce(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        """The sum over the ranks; may overwrite `tensor`."""

    def all_reduce_max(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        """The largest over the ranks, element by element; may overwrite `tensor`."""

    def all_gather(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        """The sequences of all ranks, joined in rank order."""

    def reduce_scatter(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        """This rank's part of the sequence of the sum over the ranks."""


class StandIn:
    """One rank without the others: results have the right shape, each collective is reported."""

    def __init__(self, degree: int, rank: int = 0, exchange: Exchanged | None = None) -> None:
        self.degree, self.rank, self._exchange = degree, rank, exchange

    def _report(self, op: str, full_bytes: int, where: str) -> None:
        if self._exchange is not None:
            self._exchange(op, full_bytes, where)

    def all_reduce(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        """The tensor as it is: the sum is made in place."""
        self._report("all_reduce", tensor.nbytes, where)
        return tensor

    def all_reduce_max(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        """The tensor as it is; the wire carries what a sum's does."""
        return self.all_reduce(tensor, where)

    def all_gather(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        """An empty tensor with `degree` times the sequence."""
        shape = list(tensor.shape)
        shape[SEQUENCE_DIM] *= self.degree
        gathered = tensor.new_empty(shape)
        self._report("all_gather", gathered.nbytes, where)
        return gathered

    def reduce_scatter(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        """An empty tensor with a `degree`th of the sequence."""
        shape = list(tensor.shape)
        shape[SEQUENCE_DIM] = _sequence_part(tensor, self.degree, where)
        self._report("reduce_scatter", tensor.nbytes, where)
        return tensor.new_empty(shape)

    def all_to_all(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        """A tensor of the same shape: as much arrives as leaves."""
        self._report("all_to_all", tensor.nbytes, where)
        return torch.empty_like(tensor)


class OverProcessGroup:
    """The ranks of a torch.distributed process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.degree, self.rank = (
            group,
            dist.get_world_size(group),
            dist.get_rank(group),
        )

    def all_reduce(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        """Sums in place."""
        tensor = tensor.contiguous()
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_reduce_max(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        """The largest, in place."""
        tensor = tensor.contiguous()
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor

    def all_gather(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        """Joins along the sequence; on the wire the rank is the first dimension."""
        buffer = tensor.new_empty((self.degree, *tensor.shape))
        _all_gather(buffer.flatten(0, 1), tensor.contiguous(), group=self.group)
        return buffer.movedim(0, SEQUENCE_DIM).flatten(SEQUENCE_DIM, SEQUENCE_DIM + 1)

    def reduce_scatter(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        """Sums and keeps a part; on the wire the rank is the first dimension."""
        part = _sequence_part(tensor, self.degree, where)
        parts = torch.unflatten(tensor, SEQUENCE_DIM, (self.degree, part))
        buffer = parts.movedim(SEQUENCE_DIM, 0)
        summed = tensor.new_empty(buffer.shape[1:])
        _reduce_scatter(summed, buffer.flatten(0, 1).contiguous(), group=self.group)
        return summed


# torch 2.13 renamed both and warns about the old names, which are all that 2.11 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _sequence_part(tensor: torch.Tensor, degree: int, where: str) -> int:
    part, rest = divmod(tensor.shape[SEQUENCE_DIM], degree)
    if rest:
        raise PlanError(
            f"sequence parallelism divides the sequence by the tensor-parallel degree, but a "
            f"sequence of {tensor.shape[SEQUENCE_DIM]} in {where or 'the model'} does not divide "
            f"by {degree}; choose another --seq-len or leave sequence_parallel off"
        )
    return part


def _own_part(tensor: torch.Tensor, ranks: Communicator, where: str) -> torch.Tensor:
    part = _sequence_part(tensor, ranks.degree, where)
    return tensor.narrow(SEQUENCE_DIM, ranks.rank * part, part).contiguous()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, ranks: Communicator, where: str, keep: bool
    ) -> torch.Tensor:
        ctx.ranks, ctx.where, ctx.keep = ranks, where, keep
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        own = gradient.clone() if ctx.keep else gradient
        return ctx.ranks.all_reduce(own, ctx.where), None, None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: Communicator, where: str) -> torch.Tensor:
        # Detached: the sum overwrites the matmul's result, which autograd does not keep.
        return ranks.all_reduce(tensor.detach(), where)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, ranks: Communicator, where: str, partial: bool
    ) -> torch.Tensor:
        ctx.ranks, ctx.where, ctx.partial = ranks, where, partial
        return ranks.all_gather(tensor, where)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        if ctx.partial:
            return ctx.ranks.reduce_scatter(gradient, ctx.where), None, None, None
        return _own_part(gradient, ctx.ranks, ctx.where), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, ranks: Communicator, where: str, partial: bool
    ) -> torch.Tensor:
        ctx.ranks, ctx.where = ranks, where
        if partial:
            return ranks.reduce_scatter(tensor, where)
        return _own_part(tensor, ranks, where)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.ranks.all_gather(gradient, ctx.where), None, None, None


def enter(
    tensor: torch.Tensor, ranks: Communicator, where: str, *, keep_gradient: bool = False
) -> torch.Tensor:
    """A whole tensor enters divided work: forward nothing, backward the gradients are summed.

    `keep_gradient` copies the gradient before it is summed, for tensors whose gradient buffer
    may be shared with other uses.
    """
    result: torch.Tensor = _Enter.apply(tensor, ranks, where, keep_gradient)  # type: ignore[no-untyped-call]
    return result


def reduce(tensor: torch.Tensor, ranks: Communicator, where: str) -> torch.Tensor:
    """Divided work ends: forward the sum over the ranks, backward nothing."""
    result: torch.Tensor = _Reduce.apply(tensor, ranks, where)  # type: ignore[no-untyped-call]
    return result


def gather_sequence(tensor: torch.Tensor, ranks: Communicator, where: str) -> torch.Tensor:
    """The whole sequence enters divided work: all-gather, backward reduce-scatter."""
    result: torch.Tensor = _Gather.apply(tensor, ranks, where, True)  # type: ignore[no-untyped-call]
    return result


def reduce_scatter_sequence(tensor: torch.Tensor, ranks: Communicator, where: str) -> torch.Tensor:
    """Divided work ends in parts of the sequence: reduce-scatter, backward all-gather."""
    result: torch.Tensor = _Scatter.apply(tensor, ranks, where, True)  # type: ignore[no-untyped-call]
    return result


def scatter_to_sequence(
    tensor: torch.Tensor, ranks: Communicator, where: str = ""
) -> torch.Tensor:
    """Before the first block: every rank keeps its part of the sequence; backward all-gather."""
    result: torch.Tensor = _Scatter.apply(tensor, ranks, where, False)  # type: ignore[no-untyped-call]
    return result


def gather_from_sequence(
    tensor: torch.Tensor, ranks: Communicator, where: str = ""
) -> torch.Tensor:
    """After the last block: all-gather.

    What follows is the same on every rank, so that backward keeps this rank's part.
    """
    result: torch.Tensor = _Gather.apply(tensor, ranks, where, False)  # type: ignore[no-untyped-call]
    return result
