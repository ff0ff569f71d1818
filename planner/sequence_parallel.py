"""The ends of sequence parallelism: scatter before the first block, gather after the last.

Between blocks, and between pipeline stages, each rank then holds its part of the sequence only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.utils.hooks import RemovableHandle

from claw_plan.planner.errors import PlanError
from claw_plan.planner.graph import TensorParallelRule
from claw_plan.planner.tensor_parallel import hidden_argument, input_width, regions_of
from claw_plan.planner.tp_autograd import Communicator, gather_from_sequence, scatter_to_sequence


def divide_sequence(
    blocks: Sequence[nn.Module],
    rules: Mapping[str, Sequence[TensorParallelRule]],
    ranks: Communicator,
) -> list[RemovableHandle]:
    """Hooks on the first and the last block of the whole chain; `rules` are of these blocks."""
    first_rules = next(iter(rules.values()))
    return [scatter_before(blocks[0], first_rules, ranks), gather_after(blocks[-1], ranks)]


def scatter_before(
    block: nn.Module, rules: Sequence[TensorParallelRule], ranks: Communicator
) -> RemovableHandle:
    """A hook on the first block of the whole chain; `rules` are those of this block."""
    column = regions_of(rules)[0].columns[0]
    width = input_width(block.get_submodule(column.module), column)

    def scatter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        key = hidden_argument(args, kwargs, width)
        if key is None:
            raise PlanError(f"the first block is given no hidden state [batch, sequence, {width}]")
        if isinstance(key, int):
            return (*args[:key], scatter_to_sequence(args[key], ranks), *args[key + 1 :]), kwargs
        return args, {**kwargs, key: scatter_to_sequence(kwargs[key], ranks)}

    return block.register_forward_pre_hook(scatter, with_kwargs=True)


def gather_after(block: nn.Module, ranks: Communicator) -> RemovableHandle:
    """A hook on the last block of the whole chain."""

    def gather(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return gather_from_sequence(output, ranks)
        return (gather_from_sequence(output[0], ranks), *output[1:])

    return block.register_forward_hook(gather)
