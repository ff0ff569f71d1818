"""How the blocks of a model are called, so that each can be called again alone.

`tensor_parallel_search` runs one forward of the model with these hooks and then judges every
block by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from claw_plan.planner.sequence_parallel_search import TRIAL_ERRORS


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCall:
    """How a block was called."""

    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, change: Callable[[Any], Any] = lambda value: value) -> Any:
        """Calls the block again; caches and other objects among the arguments are copied."""
        args, kwargs = _copied((self.args, self.kwargs))
        args = tuple(change(value) for value in args)
        return self.block(*args, **{name: change(value) for name, value in kwargs.items()})


def block_calls(
    model: nn.Module, names: Sequence[str], forward: Callable[[], object]
) -> dict[str, BlockCall]:
    """The first call of each block in one run of `forward`."""
    calls: dict[str, BlockCall] = {}

    def recorder(name: str) -> Callable[..., None]:
        def hook(block: nn.Module, args: Any, kwargs: Any) -> None:
            if name not in calls:
                args, kwargs = _trained(_copied((args, kwargs)))
                calls[name] = BlockCall(block=block, args=args, kwargs=kwargs)

        return hook

    handles = [
        model.get_submodule(name).register_forward_pre_hook(recorder(name), with_kwargs=True)
        for name in names
    ]
    try:
        with torch.enable_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _copied(values: Any) -> Any:
    """A deep copy in which tensors (and modules) stay themselves."""
    memo: dict[int, Any] = {}
    seen: set[int] = set()

    def keep(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor | nn.Module):
            memo[id(value)] = value
        elif isinstance(value, dict):
            for item in value.values():
                keep(item)
        elif isinstance(value, list | tuple | set):
            for item in value:
                keep(item)
        elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
            keep(value.__dict__)

    keep(values)
    try:
        return copy.deepcopy(values, memo)
    except TRIAL_ERRORS:  # an argument that cannot be copied; most are not changed by a call
        return values


def _trained(values: tuple[Any, Any]) -> tuple[Any, Any]:
    """Floating arguments without their history; the graph must reach back to the hidden state."""
    args, kwargs = values
    flat = [*args, *kwargs.values()]
    floating = [t for t in flat if isinstance(t, torch.Tensor) and t.is_floating_point()]
    trains = {id(t) for t in floating if t.requires_grad} or {id(t) for t in floating[:1]}

    def one(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        return value.detach().requires_grad_(id(value) in trains)

    return tuple(one(v) for v in args), {name: one(v) for name, v in kwargs.items()}
