"""Context parallelism on an untouched model: each rank of cp runs it on a part of every sequence.

Inputs stay whole, they are small. A table that is asked for an input's tokens answers with this
rank's part of them, as a `HeadShard` that has the shape of the whole; where no table does, the
hidden state is divided before the first block. What follows is local but for attention
(`context_parallel_attention`) and the loss (`context_parallel_ops`). The loss is the whole one,
the same on all ranks, and gradients of parameters are to be averaged over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
import torch.nn as nn
from torch.utils.hooks import RemovableHandle

from claw_plan.planner import (
    context_parallel_attention,
    context_parallel_ops,
    head_shard_ops,
    head_shard_views,
)
from claw_plan.planner.context_parallel_division import SequenceDivision, sequence_division
from claw_plan.planner.context_parallel_ranks import ContextRanks
from claw_plan.planner.errors import PlanError
from claw_plan.planner.head_shard import SHARED, HeadShard
from claw_plan.planner.torch_private import tree_leaves

TRANSLATIONS = (
    context_parallel_attention, context_parallel_ops, head_shard_ops, head_shard_views,
)  # fmt: skip
"""Imported for what they register."""

SEQUENCE_DIM = 1
"""Of a hidden state [batch, sequence, ...]."""


@dataclass
class ContextParallelModel:
    """The hooks on a model; `remove` makes it whole again."""

    division: SequenceDivision
    _inputs: set[torch.Size] = field(default_factory=set)
    _parted: list[int | None] = field(default_factory=list)
    _handles: list[RemovableHandle] = field(default_factory=list)

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def note_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Remembers the shapes of the batch's tokens: what a model makes of them has them too."""
        self._inputs = {leaf.shape for leaf in tree_leaves((args, kwargs)) if _are_tokens(leaf)}

    def part_tokens(self, table: nn.Module, args: Any) -> Any:
        """Before a table: this rank's part of the batch's tokens."""
        tokens = args[0] if args else None
        if not _are_tokens(tokens) or tokens.shape not in self._inputs:
            self._parted.append(None)
            return None
        self._parted.append(tokens.ndim - 1)
        return (self.division.divide(tokens, -1), *args[1:])

    def hold_rows(self, table: nn.Module, args: Any, rows: Any) -> Any:
        """After a table: its rows, where they are those of a part, as one of the whole."""
        dim = self._parted.pop()
        return None if dim is None else self.division.held(rows, dim)

    def part_hidden(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before the first block: divides the hidden state where it is whole."""
        leaves = tree_leaves((args, kwargs))
        if any(isinstance(leaf, HeadShard) for leaf in leaves):
            return None
        hidden = next((leaf for leaf in leaves if _is_hidden(leaf)), None)
        if hidden is None:
            raise PlanError(
                f"cp={self.division.degree}: the first block is given no hidden state [batch, "
                "sequence, width] to divide; use cp=1"
            )

        def changed(value: Any) -> Any:
            if value is not hidden:
                return value
            return self.division.held(self.division.divide(value, SEQUENCE_DIM), SEQUENCE_DIM)

        return tuple(map(changed, args)), {name: changed(v) for name, v in kwargs.items()}


def divide_context(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    kind: str,
    ranks: ContextRanks,
    *,
    drawing: AbstractContextManager[None] = SHARED,
    is_planned: bool = False,
) -> ContextParallelModel:
    """Makes `model`, in place, one rank's part of a context-parallel one.

    Random numbers for a rank's own tokens are drawn inside `drawing`.
    """
    division = sequence_division(kind, ranks, drawing=drawing, is_planned=is_planned)
    divided = ContextParallelModel(division)
    handles = divided._handles
    handles.append(
        model.register_forward_pre_hook(divided.note_inputs, prepend=True, with_kwargs=True)
    )
    for table in model.modules():
        if isinstance(table, nn.Embedding):
            handles.append(table.register_forward_pre_hook(divided.part_tokens, prepend=True))
            handles.append(table.register_forward_hook(divided.hold_rows))
    if blocks:
        handles.append(
            blocks[0].register_forward_pre_hook(
                divided.part_hidden, prepend=True, with_kwargs=True
            )
        )
    return divided


def whole_loss(loss: torch.Tensor, degree: int) -> torch.Tensor:
    """The loss if it is one number of all positions; raises PlanError otherwise."""
    if isinstance(loss, HeadShard):
        raise PlanError(f"cp={degree}: the loss is one of each position; answer with their mean")
    return loss


def _are_tokens(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether it may be tokens [batch, ..., sequence], whole."""
    if not isinstance(value, torch.Tensor) or isinstance(value, HeadShard) or value.ndim < 2:
        return False
    return not value.is_floating_point() and value.dtype is not torch.bool


def _is_hidden(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > 2
