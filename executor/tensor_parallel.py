"""The plan's tensor-parallel rules applied to this rank's stage: its blocks, and their ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch.nn as nn

from claw_plan.executor.mesh import Mesh
from claw_plan.planner.errors import PlanError
from claw_plan.planner.expert_tensor_parallel import EXPERTS, divide_experts
from claw_plan.planner.graph import TensorParallelRule
from claw_plan.planner.plan import Plan, PlanTensorParallel
from claw_plan.planner.plan_stages import block_pattern
from claw_plan.planner.sequence_parallel import gather_after, scatter_before
from claw_plan.planner.tensor_parallel import TensorParallelModel, apply_rules
from claw_plan.planner.tp_autograd import OverProcessGroup
from claw_plan.planner.vocabulary_parallel import STYLES, divide_vocabulary
from claw_plan.planner.vocabulary_parallel_order import rows_of_text


def divide_weights(
    plan: Plan,
    model: nn.Module,
    blocks: Sequence[str],
    mesh: Mesh,
    drawing: AbstractContextManager[None],
) -> TensorParallelModel:
    """Divides the weights of these blocks, and of tables and heads, over the tp axis, in place.

    On its heads and columns a rank draws random numbers inside `drawing`.

    Under sequence parallelism the ends of the whole chain of blocks scatter and gather the
    sequence, on the stages that hold them.
    """
    every = rules_of(plan, model, blocks)
    rules, experts = _of_style(every, EXPERTS, False), _of_style(every, EXPERTS, True)
    if not rules and not _fits_elsewhere(plan):
        raise PlanError(
            "the plan has tp > 1 and no tensor_parallel rule that fits its blocks; plan again"
        )
    ranks = OverProcessGroup(mesh.group("tp"))
    sequence = plan.knobs().sequence_parallel
    divided = apply_rules(model, rules, ranks, sequence_parallel=sequence, drawing=drawing)
    divide_experts(model, experts, divided, sequence_parallel=sequence)
    divide_vocabulary(model, _vocabulary_rules(plan), divided)
    first, last = plan.blocks[0], plan.blocks[-1]
    if sequence and first in blocks:
        scatter_before(model.get_submodule(first), rules[first], ranks)
    if sequence and last in blocks:
        gather_after(model.get_submodule(last), ranks)
    return divided


def _fits_elsewhere(plan: Plan) -> bool:
    """Whether any rule is one for blocks of the plan: other stages may have those divided."""
    patterns = tuple(
        {f"{name}." for block in plan.blocks for name in (block_pattern(block), block)}
    )
    return any(f"{rule.modules}.".startswith(patterns) for rule in plan.tensor_parallel)


def _of_style(
    rules: Mapping[str, Sequence[TensorParallelRule]], style: str, wanted: bool
) -> dict[str, list[TensorParallelRule]]:
    """The rules of the style, or all others, of the blocks that have any."""
    found = {
        block: [rule for rule in own if (rule.style == style) == wanted]
        for block, own in rules.items()
    }
    return {block: own for block, own in found.items() if own}


def rules_of(
    plan: Plan, model: nn.Module, blocks: Sequence[str]
) -> dict[str, list[TensorParallelRule]]:
    """The plan's rules block by block, with modules named from the block.

    Raises PlanError where the blocks are all and a rule is for none: it would divide nothing.
    """
    rules: dict[str, list[TensorParallelRule]] = {}
    left = {rule.modules for rule in plan.tensor_parallel if rule.style not in STYLES}
    for block in blocks:
        names = {name for name, _ in model.get_submodule(block).named_modules()}
        for rule in plan.tensor_parallel:
            for named in dict.fromkeys((block_pattern(block), block)):
                prefix, _, inner = (rule.modules + ".").partition(named + ".")
                if rule.style not in STYLES and not prefix and inner.rstrip(".") in names:
                    rules.setdefault(block, []).append(_rule(rule, inner.rstrip(".")))
                    left.discard(rule.modules)
    if left and len(blocks) == len(plan.blocks):
        raise PlanError(
            f"tensor_parallel names {min(left)}, which is in none of the plan's blocks; plan again"
        )
    return rules


def _vocabulary_rules(plan: Plan) -> list[TensorParallelRule]:
    """The rules of tables and heads, with modules named from the model."""
    rows = tuple(rows_of_text(plan.vocabulary_rows)) if plan.vocabulary_rows else ()
    rules = [_rule(rule, rule.modules) for rule in plan.tensor_parallel if rule.style in STYLES]
    return [replace(rule, rows=rows) if rule.heads == len(rows) else rule for rule in rules]


def _rule(rule: PlanTensorParallel, module: str) -> TensorParallelRule:
    return TensorParallelRule(
        module=module,
        style=rule.style,
        heads=rule.heads,
        parts=rule.parts,
        weight_dims=rule.weight_dims,
    )
