"""Module patterns of a plan, read back: 'h[0:6]' to names, stages to runs of units."""

from __future__ import annotations

import re
from collections.abc import Sequence

from claw_plan.planner.errors import PlanError
from claw_plan.planner.graph import ModelGraph
from claw_plan.planner.plan import Plan

MOST_BLOCKS = 100_000
"""No model has more; a larger number is a slip, and would be written out name by name."""


def expand_names(modules: Sequence[str]) -> list[str]:
    """'h[0:2]' to 'h.0', 'h.1'; other names as they are."""
    names: list[str] = []
    for module in modules:
        match = re.fullmatch(r"(.*)\[(\d+):(\d+)\]", module)
        if match is None:
            names.append(module)
            continue
        first, end = int(match[2]), int(match[3])
        if not first < end <= MOST_BLOCKS:
            raise PlanError(f"{module} is no run of blocks, as h[0:6] is")
        names += [f"{match[1]}.{index}" for index in range(first, end)]
    return names


def block_pattern(block: str) -> str:
    """How a plan names the block together with its neighbours: 'h.3' is one of 'h[*]'."""
    prefix, _, number = block.rpartition(".")
    return f"{prefix}[*]" if number.isdecimal() and prefix else block


def stage_spans(plan: Plan) -> list[tuple[int, int]]:
    """For each stage its blocks as [start, end) into `plan.blocks`.

    Raises PlanError unless the stages hold all blocks once, in order, and at least one each.
    """
    if not plan.stages:
        raise PlanError("stages is empty; a plan has one stage or more")
    if len(plan.stages) == 1:
        return [(0, len(plan.blocks))]
    place = {name: index for index, name in enumerate(plan.blocks)}
    spans: list[tuple[int, int]] = []
    for index, stage in enumerate(plan.stages):
        held = [place[name] for name in expand_names(stage.modules) if name in place]
        start = spans[-1][1] if spans else 0
        if not held or held != list(range(start, start + len(held))):
            raise PlanError(
                f"stages[{index}] must hold the blocks that follow block {start - 1}, in order "
                f"and at least one, but its modules are {', '.join(stage.modules)}"
            )
        spans.append((start, start + len(held)))
    if spans[-1][1] != len(plan.blocks):
        raise PlanError(
            f"no stage holds {plan.blocks[spans[-1][1]]}; the stages together hold every block"
        )
    return spans


def cuts_of_plan(plan: Plan, graph: ModelGraph) -> tuple[tuple[int, int], ...]:
    """The stages as runs of units, prologue and epilogue included."""
    names = [block.name for block in graph.blocks]
    if plan.blocks != names:
        raise PlanError(
            f"the plan's blocks are {plan.blocks[:3]}…, but the model's are {names[:3]}…; "
            "the model has changed, so plan it again"
        )
    spans = stage_spans(plan)
    last = len(spans) - 1
    _check_ends(plan, graph)
    return tuple(
        (0 if index == 0 else start + 1, len(graph.units) if index == last else end + 1)
        for index, (start, end) in enumerate(spans)
    )


def _check_ends(plan: Plan, graph: ModelGraph) -> None:
    """Beside blocks the first stage holds what runs before them, the last what runs after."""
    first, last = graph.units[0].modules, graph.units[-1].modules
    for index, stage in enumerate(plan.stages):
        expected = {*first} if index == 0 else set()
        expected |= {*last} if index == len(plan.stages) - 1 else set()
        found = set(expand_names(stage.modules)) - set(plan.blocks)
        if found != expected:
            raise PlanError(
                f"stages[{index}] holds {', '.join(sorted(found)) or 'nothing'} beside its "
                f"blocks, but must hold {', '.join(sorted(expected)) or 'nothing'}"
            )
