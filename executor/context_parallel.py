"""A stage that runs on this rank's part of every sequence, with its parameters in shards.

`planner.context_parallel` divides the sequence. fully_shard looks at what enters and leaves the
modules it holds and puts gradients' hooks on it, which must be on the tensors that autograd knows:
around its own hooks a divided tensor is opened to its local part, and closed again behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from claw_plan.executor.mesh import Mesh
from claw_plan.executor.stages import Stage
from claw_plan.executor.torch_private import tree_map
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.context_parallel import divide_context, whole_loss
from claw_plan.planner.context_parallel_division import SequenceDivision
from claw_plan.planner.context_parallel_ranks import ContextGroup
from claw_plan.planner.errors import PlanError
from claw_plan.planner.head_shard import HeadShard, Layout


def hold_part(
    stage: Stage,
    blocks: Sequence[str],
    knobs: Candidate,
    mesh: Mesh,
    drawing: AbstractContextManager[None],
) -> None:
    """Divides the sequences of a stage whose blocks are sharded, in place.

    Random numbers for this rank's tokens are drawn inside `drawing`.
    """
    modules = [stage.model.get_submodule(name) for name in blocks]
    for module in modules:
        _open_around_hooks(module)
    ranks = ContextGroup(mesh.group("cp"))
    divided = divide_context(stage.model, modules, knobs.cp_comm_type, ranks, drawing=drawing)
    stage.takes = partial(_held, divided.division)
    stage.register_forward_hook(
        lambda module, args, loss: whole_loss(loss, knobs.cp), prepend=True
    )


def _held(
    division: SequenceDivision, received: torch.Tensor, recorded: torch.Tensor
) -> torch.Tensor:
    """What another stage sent, divided where it is smaller than in the recorded model."""
    if received.shape == recorded.shape:
        return received
    sizes = zip(received.shape, recorded.shape, strict=True)
    smaller = [dim for dim, (own, whole) in enumerate(sizes) if own != whole]
    if len(smaller) > 1 or smaller[0] == 0:
        raise PlanError(
            f"cp={division.degree}: a stage is sent {list(received.shape)} of a hidden state of "
            f"{list(recorded.shape)}, whose sequence is no dimension of its own; use pp=1"
        )
    return division.held(received, smaller[0])


def _open_around_hooks(module: nn.Module) -> None:
    """Hooks before and behind those that the module has."""
    entering, leaving = _Opened(), _Opened()
    module.register_forward_pre_hook(
        lambda module, args, kwargs: entering.open((args, kwargs)), prepend=True, with_kwargs=True
    )
    module.register_forward_pre_hook(
        lambda module, args, kwargs: entering.close((args, kwargs)), with_kwargs=True
    )
    module.register_forward_hook(lambda module, args, out: leaving.open(out), prepend=True)
    module.register_forward_hook(lambda module, args, out: leaving.close(out))


class _Opened:
    """Divided tensors that are open, by their places among the leaves of a tree."""

    def __init__(self) -> None:
        self._layouts: list[dict[int, Layout]] = []

    def open(self, tree: Any) -> Any:
        """Local parts in the place of divided tensors."""
        layouts: dict[int, Layout] = {}
        place = -1

        def opened(leaf: Any) -> Any:
            nonlocal place
            place += 1
            if not isinstance(leaf, HeadShard):
                return leaf
            layouts[place] = leaf.divided
            return leaf.local

        result = tree_map(opened, tree)
        self._layouts.append(layouts)
        return result

    def close(self, tree: Any) -> Any:
        """Divided tensors in the places where they were."""
        layouts, place = self._layouts.pop(), -1

        def closed(leaf: Any) -> Any:
            nonlocal place
            place += 1
            return HeadShard(leaf, layouts[place]) if place in layouts else leaf

        return tree_map(closed, tree)
