"""`check_model`: is the model that was built the one that the plan was made for?

The hash of its file is compared before anything runs. What the file imports may have changed all
the same (a library's new version, another file of the project), or a trainer of one's own passes
another model: blocks, ties and tables that are no longer there would train something else than
was predicted, or fail in the middle of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn as nn

from claw_plan.planner.errors import PlanError
from claw_plan.planner.plan import Plan
from claw_plan.planner.plan_stages import expand_names
from claw_plan.planner.vocabulary_parallel import STYLES


def check_model(plan: Plan, model: nn.Module) -> None:
    """Raises PlanError for the first thing in which the whole model is not the plan's.

    What planning wrote lists all ties and counts all parameters; a plan that somebody wrote by
    hand, without a prediction, may leave that out.
    """
    problem = next(_problems(plan, model), None)
    if problem is not None:
        raise PlanError(
            f"{plan.model.file} makes another model than the one that was planned: {problem}; "
            "plan again"
        )


def _problems(plan: Plan, model: nn.Module) -> Iterator[str]:
    modules = dict(model.named_modules(remove_duplicate=False))
    named = [*plan.blocks, *(n for s in plan.stages for n in expand_names(s.modules))]
    for name in named:
        if name not in modules:
            yield f"it has no module {name}"
    yield from _ties(plan, model)
    for rule in plan.tensor_parallel:
        if rule.style not in STYLES:
            continue
        weight = getattr(modules.get(rule.modules), "weight", None)
        rows = None if weight is None else weight.shape[0]
        if rows != rule.heads:
            yield f"{rule.modules} has {rows or 'no'} rows, and {rule.heads} were to be divided"
    found = sum(parameter.numel() for parameter in model.parameters())
    if plan.prediction is not None and found != plan.model.parameters:
        yield f"it has {found} parameters, and {plan.model.parameters} were planned"


def _ties(plan: Plan, model: nn.Module) -> Iterator[str]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = {frozenset(group) for group in names.values() if len(group) > 1}
    planned = {frozenset(tie.parameters) for tie in plan.tied}
    for group in sorted(map(sorted, planned - found)):
        yield f"{' and '.join(group)} are not one parameter"
    if plan.prediction is not None or planned:
        for group in sorted(map(sorted, found - planned)):
            yield f"{' and '.join(group)} are one parameter"
