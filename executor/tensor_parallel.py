"""The plan's tensor-parallel rules applied to the blocks of this rank's stage.

`planner.tensor_parallel` divides weights and moves activations inside a block. What is left for
the whole chain is here: under sequence parallelism the hidden state is scattered along the
sequence before the first block of all and gathered after the last, so that between blocks, and
between pipeline stages, each rank holds its part only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn

from claw_plan.executor.mesh import Mesh
from claw_plan.planner.errors import PlanError
from claw_plan.planner.graph import TensorParallelRule
from claw_plan.planner.plan import Plan
from claw_plan.planner.tensor_parallel import (
    TensorParallelModel,
    apply_rules,
    hidden_argument,
    input_width,
    regions_of,
)
from claw_plan.planner.tp_autograd import (
    Communicator,
    OverProcessGroup,
    gather_from_sequence,
    scatter_to_sequence,
)


def divide_weights(
    plan: Plan, model: nn.Module, blocks: Sequence[str], mesh: Mesh
) -> TensorParallelModel:
    """Divides the weights of these blocks over the tp axis, in place."""
    rules = rules_of(plan, model, blocks)
    if not rules:
        raise PlanError(
            "the plan has tp > 1 and no tensor_parallel rule that fits its blocks; plan again"
        )
    ranks = OverProcessGroup(mesh.group("tp"))
    sequence = plan.knobs().sequence_parallel
    divided = apply_rules(model, rules, ranks, sequence_parallel=sequence)
    if sequence:
        width = _hidden_width(model, rules)
        if plan.blocks[0] in blocks:
            _scatter_before(model.get_submodule(plan.blocks[0]), ranks, width)
        if plan.blocks[-1] in blocks:
            _gather_after(model.get_submodule(plan.blocks[-1]), ranks)
    return divided


def rules_of(
    plan: Plan, model: nn.Module, blocks: Sequence[str]
) -> dict[str, list[TensorParallelRule]]:
    """The plan's rules block by block, with modules named from the block."""
    rules: dict[str, list[TensorParallelRule]] = {}
    for block in blocks:
        names = {name for name, _ in model.get_submodule(block).named_modules()}
        pattern = _pattern(block)
        for rule in plan.tensor_parallel:
            prefix, _, inner = (rule.modules + ".").partition(pattern + ".")
            if prefix or inner.rstrip(".") not in names:
                continue
            rules.setdefault(block, []).append(
                TensorParallelRule(
                    module=inner.rstrip("."),
                    style=rule.style,
                    heads=rule.heads,
                    parts=rule.parts,
                    weight_dims=rule.weight_dims,
                )
            )
    return rules


def _pattern(block: str) -> str:
    """How the plan names the block together with its neighbours: 'h.3' is one of 'h[*]'."""
    prefix, _, number = block.rpartition(".")
    return f"{prefix}[*]" if number.isdecimal() and prefix else block


def _hidden_width(model: nn.Module, rules: Mapping[str, Sequence[TensorParallelRule]]) -> int:
    block, block_rules = next(iter(rules.items()))
    column = regions_of(block_rules)[0].columns[0]
    return input_width(model.get_submodule(block).get_submodule(column.module), column)


def _scatter_before(block: nn.Module, ranks: Communicator, width: int) -> None:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        key = hidden_argument(args, kwargs, width)
        if key is None:
            raise PlanError(
                f"the first block is given no hidden state [batch, sequence, {width}], so its "
                "sequence cannot be divided; plan again with --fix sequence_parallel=false"
            )
        if isinstance(key, int):
            scattered = scatter_to_sequence(args[key], ranks)
            return (*args[:key], scattered, *args[key + 1 :]), kwargs
        return args, {**kwargs, key: scatter_to_sequence(kwargs[key], ranks)}

    block.register_forward_pre_hook(hook, with_kwargs=True)


def _gather_after(block: nn.Module, ranks: Communicator) -> None:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return gather_from_sequence(output, ranks)
        return (gather_from_sequence(output[0], ranks), *output[1:])

    block.register_forward_hook(hook)
