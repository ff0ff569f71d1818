"""Losses of logits divided over the vocabulary: what a cross entropy needs, without gathering.

Importing this module fills `planner.head_shard.HANDLERS`. Of every token's scores the ranks share
the largest, the sum of exponentials and the score of the target, each one number, as Megatron does
(Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3; megatron/core/tensor_parallel/
cross_entropy.py). Backward needs no other rank. Semantics are torch's: `ignore_index`,
`label_smoothing`, all reductions, classes on dimension 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from claw_plan.planner.head_shard import Arguments, Division, HeadShard, Layout, chunk_of, handles
from claw_plan.planner.tp_autograd import Communicator, reduce
from claw_plan.planner.vocabulary_parallel_order import RowOrder

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Rows [start, stop) of a vocabulary of `total`, which this rank holds; those of `order`."""

    ranks: Communicator
    where: str
    total: int
    start: int
    stop: int
    order: RowOrder | None = None

    @classmethod
    def of(
        cls, ranks: Communicator, where: str, total: int, order: RowOrder | None = None
    ) -> Chunk:
        """The chunk of this rank."""
        start, stop = chunk_of(total, ranks.degree, ranks.rank)
        return cls(ranks=ranks, where=where, total=total, start=start, stop=stop, order=order)

    def place_of(self, row: int) -> int:
        """Where one row stands."""
        return row if self.order is None else int(self.order.places(torch.tensor([row])))

    def locate(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(local rows, mask of what lies elsewhere); elsewhere is row 0.

        The first rank takes what is below its rows and the last what is above them, so that an
        index outside the vocabulary is refused by the kernel as in one process.
        """
        places = indices if self.order is None else self.order.places(indices)
        local = places - self.start
        elsewhere = torch.zeros_like(local, dtype=torch.bool)
        if self.start > 0:
            elsewhere = local < 0
        if self.stop < self.total:
            elsewhere = elsewhere | (local >= self.stop - self.start)
        return local.masked_fill(elsewhere, 0), elsewhere


def full_precision(scores: torch.Tensor) -> torch.Tensor:
    """16-bit scores in fp32, in which torch's own losses add up."""
    is_short = scores.dtype in (torch.float16, torch.bfloat16)
    return scores.to(torch.float32) if is_short else scores


class _CrossEntropy(torch.autograd.Function):
    """Losses of rows of scores, 0 where the target is ignored."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        chunk: Chunk,
        ignore_index: int,
        smoothing: float,
    ) -> torch.Tensor:
        scores, ignored = full_precision(logits), target == ignore_index
        largest = chunk.ranks.all_reduce_max(scores.amax(-1), chunk.where)
        shifted = scores - largest.unsqueeze(-1)
        rows, elsewhere = chunk.locate(target.masked_fill(ignored, chunk.start))
        elsewhere = elsewhere | ignored
        picked = shifted.gather(-1, rows.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0)
        shares = [picked, shifted.sum(-1)] if smoothing else [picked]
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(-1), *shares])
        total, picked, *every = chunk.ranks.all_reduce(sums, chunk.where).unbind(0)
        logarithm = total.log()
        losses = logarithm - picked
        if smoothing:
            uniform = logarithm - every[0] / chunk.total
            losses = (1 - smoothing) * losses + smoothing * uniform
        probabilities = exponentials.div_(total.unsqueeze(-1)).to(logits.dtype)
        ctx.save_for_backward(probabilities, rows, elsewhere, ignored)
        ctx.smoothing, ctx.classes = smoothing, chunk.total
        return losses.masked_fill(ignored, 0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        probabilities, rows, elsewhere, ignored = ctx.saved_tensors
        weight = gradient.masked_fill(ignored, 0).to(probabilities.dtype).unsqueeze(-1)
        result = probabilities * weight
        if ctx.smoothing:
            result -= weight * (ctx.smoothing / ctx.classes)
        hits = weight.masked_fill(elsewhere.unsqueeze(-1), 0) * (ctx.smoothing - 1)
        return result.scatter_add_(-1, rows.unsqueeze(-1), hits), None, None, None, None


class _LogSoftmax(torch.autograd.Function):
    """Over the last dimension, divided."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        largest = chunk.ranks.all_reduce_max(scores.amax(-1, keepdim=True), chunk.where)
        shifted = full_precision(scores - largest)
        total = chunk.ranks.all_reduce(shifted.exp().sum(-1, keepdim=True), chunk.where)
        result = shifted.sub_(total.log()).to(scores.dtype)
        ctx.chunk = chunk
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (result,) = ctx.saved_tensors
        summed = full_precision(gradient).sum(-1, keepdim=True)
        summed = ctx.chunk.ranks.all_reduce(summed, ctx.chunk.where)
        return gradient - result.exp() * summed.to(gradient.dtype), None


def log_softmax(shard: HeadShard, dtype: torch.dtype | None) -> HeadShard:
    """The logarithm of the softmax along the divided vocabulary."""
    layout = shard.divided
    local = shard.local if dtype is None else shard.local.to(dtype)
    result = _LogSoftmax.apply(local.movedim(layout.dim, -1), _chunk(layout))  # type: ignore[no-untyped-call]
    return HeadShard(result.movedim(-1, layout.dim), layout)


def _chunk(layout: Layout) -> Chunk:
    assert layout.extent is not None
    division: Division = layout.division
    return Chunk.of(division.ranks, division.where, layout.extent, division.order)


def _rows_of_scores(arguments: Arguments) -> tuple[torch.Tensor, torch.Tensor, Layout]:
    """Scores [tokens, own classes] and targets [tokens]; refuses what has no divided form."""
    shard, target = arguments.get(0, "input"), arguments.get(1, "target")
    if not isinstance(shard, HeadShard) or shard.divided.extent is None:
        raise arguments.refused("has no divided form here")
    if shard.divided.dim != min(1, shard.ndim - 1):
        raise arguments.refused("runs over another dimension than the divided one")
    if isinstance(target, HeadShard) or target.is_floating_point():
        raise arguments.refused("is given probabilities as targets")
    if arguments.get(2, "weight") is not None:
        raise arguments.refused("weighs the classes")
    if arguments.get(3, "size_average") is not None or arguments.get(5, "reduce") is not None:
        raise arguments.refused("is given size_average or reduce, which torch has given up")
    scores = shard.local.movedim(shard.divided.dim, -1)
    return scores.reshape(-1, scores.shape[-1]), target.reshape(-1), shard.divided


def _reduced(
    losses: torch.Tensor, target: torch.Tensor, ignore_index: int, arguments: Arguments
) -> torch.Tensor:
    """By the `reduction` that cross_entropy and nll_loss take at the same place."""
    reduction = arguments.get(6, "reduction", "mean")
    if reduction == "none":
        return losses.view(target.shape)
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (target != ignore_index).sum()


@handles("cross_entropy")
def _cross_entropy(func: Function, arguments: Arguments) -> torch.Tensor:
    scores, target, layout = _rows_of_scores(arguments)
    ignore_index = arguments.get(4, "ignore_index", -100)
    smoothing = arguments.get(7, "label_smoothing", 0.0)
    losses = _CrossEntropy.apply(scores, target, _chunk(layout), ignore_index, smoothing)  # type: ignore[no-untyped-call]
    whole = arguments.get(1, "target")
    return _reduced(losses, whole, ignore_index, arguments).to(scores.dtype)


@handles("nll_loss")
def _nll_loss(func: Function, arguments: Arguments) -> torch.Tensor:
    scores, target, layout = _rows_of_scores(arguments)
    ignore_index, chunk = arguments.get(4, "ignore_index", -100), _chunk(layout)
    ignored = target == ignore_index
    rows, elsewhere = chunk.locate(target.masked_fill(ignored, chunk.start))
    own = scores.gather(-1, rows.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere | ignored, 0)
    losses = -reduce(own, chunk.ranks, chunk.where)
    return _reduced(losses, arguments.get(1, "target"), ignore_index, arguments)
