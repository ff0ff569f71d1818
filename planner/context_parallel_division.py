"""`SequenceDivision`: how tensors that are divided along the sequence lie on the ranks of cp.

A `HeadShard` of such a division answers with the shapes of the whole sequence, so whatever a model
makes of its length (positions, masks, rotary tables) is made for the whole, and a rank takes its
own rows where that meets its tokens. Whole tensors are computed alike on all ranks; their
gradients are parts, which come together where the gradients of parameters are averaged.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from claw_plan.planner.candidate import ALL_GATHER, ALL_TO_ALL
from claw_plan.planner.context_parallel_ranks import (
    ContextRanks,
    Pieces,
    gather,
    own_chunks,
)
from claw_plan.planner.errors import PlanError
from claw_plan.planner.head_shard import SHARED, Division, Handler, HeadShard, Layout

Function = Callable[..., Any]

PIECES = {ALL_GATHER: 2, ALL_TO_ALL: 1}
"""Of two pieces each rank has an early and a late chunk: causal work is then the same on all.
Where heads are exchanged a rank attends over all positions anyway."""


class _Positions:
    """Degree and rank alone: the sums that tensor parallelism makes are not made here."""

    def __init__(self, degree: int, rank: int) -> None:
        self.degree, self.rank = degree, rank

    def _refuse(self, tensor: torch.Tensor, where: str) -> NoReturn:
        raise PlanError(f"{where}: a sum over heads does not act on a divided sequence")

    all_reduce = all_reduce_max = all_gather = reduce_scatter = _refuse


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceDivision(Division):
    """See the module. `is_planned` where one rank runs alone to be recorded."""

    kind: str
    context: ContextRanks
    is_planned: bool = False

    @property
    def chunks(self) -> tuple[int, int]:
        """Which of the 2 x degree chunks of a balanced sequence are this rank's."""
        return self.context.rank, 2 * self.degree - 1 - self.context.rank

    def own_part(self, whole: torch.Tensor, dim: int, parts: int) -> torch.Tensor:
        """This rank's chunks of `dim`."""
        return own_chunks(whole, dim, self.pieces(parts), self.context)

    def pieces(self, parts: int) -> Pieces:
        """How so many pieces lie on the ranks."""
        return Pieces(parts, mirrored=self.kind == ALL_GATHER)

    def own_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's heads, which come before the last two dimensions."""
        size = tensor.shape[-3] // self.degree
        return tensor.narrow(-3, self.context.rank * size, size)

    def divide(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of a whole sequence; raises PlanError where the degree has no part."""
        pieces = PIECES[self.kind]
        length, chunks = int(whole.shape[dim]), pieces * self.degree
        if length % chunks:
            each = f"{pieces} x {self.degree} chunks" if pieces > 1 else f"{chunks} parts"
            raise PlanError(
                f"cp={self.degree}: a sequence of {length} does not divide into {each}; choose "
                "another --seq-len or degree"
            )
        return self.own_part(whole, dim, pieces)

    def held(self, part: torch.Tensor, dim: int) -> HeadShard:
        """A part as the model sees it: with the shape of the whole."""
        return HeadShard(part, Layout(division=self, dim=dim, parts=PIECES[self.kind]))


SEQUENCE_HANDLERS: dict[str, Handler] = {}
"""Translations by the name of the torch function: `context_parallel_attention` and `_ops`."""


def handles(names: str) -> Callable[[Handler], Handler]:
    """Registers a translation under the names of the functions it is for."""

    def register(handler: Handler) -> Handler:
        SEQUENCE_HANDLERS.update(dict.fromkeys(names.split(), handler))
        return handler

    return register


def division_of(shard: HeadShard) -> SequenceDivision:
    """How its sequence is divided."""
    division = shard.divided.division
    assert isinstance(division, SequenceDivision)
    return division


def whole(shard: HeadShard) -> torch.Tensor:
    """The tensor of all positions, gathered from all ranks."""
    layout, division = shard.divided, division_of(shard)
    return gather(shard.local, layout.dim, division.pieces(layout.parts), division.context)


def offset_of(tensor: torch.Tensor) -> int:
    """How far from the right the divided dimension is; 0 where there is none."""
    return tensor.ndim - tensor.divided.dim if isinstance(tensor, HeadShard) else 0


def sequence_division(
    kind: str,
    ranks: ContextRanks,
    *,
    drawing: AbstractContextManager[None] = SHARED,
    is_planned: bool = False,
) -> SequenceDivision:
    """The division of one model's sequences."""
    return SequenceDivision(
        ranks=_Positions(ranks.degree, ranks.rank),
        where="the sequence",
        drawing=drawing,
        handlers=SEQUENCE_HANDLERS,
        sums_gradients=False,
        kind=kind,
        context=ranks,
        is_planned=is_planned,
    )
