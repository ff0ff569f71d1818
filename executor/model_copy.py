"""A copy of a model that shares nothing with it, for each further stage of a rank.

`copy.deepcopy` leaves functions as they are. One that a module keeps and that has a part of the
model in its closure (minGPT's `self.mlpf = lambda x: m.c_proj(...)`) would go on to compute with
the parameters of the original, and train them, without a word.
"""

from __future__ import annotations

import copy
from types import CellType, FunctionType
from typing import Any

import torch.nn as nn

Memo = dict[int, Any]
"""deepcopy's own: the id of what was copied to its copy."""


def copied(model: nn.Module) -> nn.Module:
    """The copy; its modules' functions and hooks hold the copies of what they held."""
    memo: Memo = {}
    own = copy.deepcopy(model, memo)
    for module in own.modules():
        _rebind(vars(module), memo)
    return own


def _rebind(values: dict[Any, Any], memo: Memo) -> None:
    for name, value in values.items():
        if isinstance(value, FunctionType):
            values[name] = _rebound(value, memo)
        elif isinstance(value, dict):  # the hooks of a module, by their ids
            _rebind(value, memo)


def _rebound(function: FunctionType, memo: Memo) -> FunctionType:
    if not function.__closure__:
        return function
    if id(function) not in memo:
        cells = tuple(CellType() for _ in function.__closure__)
        own = FunctionType(
            function.__code__, function.__globals__, function.__name__,
            function.__defaults__, cells,
        )  # fmt: skip
        own.__kwdefaults__ = function.__kwdefaults__
        memo[id(function)] = own  # before its cells, in which it may be itself
        for cell, held in zip(cells, function.__closure__, strict=True):
            cell.cell_contents = _part(held.cell_contents, memo)
    found: FunctionType = memo[id(function)]
    return found


def _part(held: Any, memo: Memo) -> Any:
    """The copy of what a closure held, or the same where the model has no part in it."""
    if isinstance(held, FunctionType):
        return _rebound(held, memo)
    if isinstance(held, list | tuple | dict):
        return copy.deepcopy(held, memo)
    return memo.get(id(held), held)
