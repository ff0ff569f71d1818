"""Modules of all blocks under one name in a plan: 'h[*]' for each block of a container."""

from __future__ import annotations

from collections.abc import Sequence

from claw_plan.planner.graph import ModelGraph
from claw_plan.planner.plan import PlanExpertParallel


def block_patterns(graph: ModelGraph, structures: Sequence[int]) -> list[str]:
    """'h[*]' for every container whose blocks all have one of the structures, else the blocks."""
    wanted = [b for b in graph.blocks if not structures or b.structure in structures]
    others = {b.name.rpartition(".")[0] for b in graph.blocks if b not in wanted}
    patterns: dict[str, None] = {}
    for block in wanted:
        prefix, _, number = block.name.rpartition(".")
        is_all = number.isdecimal() and prefix and prefix not in others
        patterns[f"{prefix}[*]" if is_all else block.name] = None
    return list(patterns)


def expert_rules(graph: ModelGraph, ep: int) -> list[PlanExpertParallel]:
    """Which modules' experts are shared out over so many ranks."""
    return [
        PlanExpertParallel(
            modules=f"{pattern}.{rule.module}",
            experts=rule.experts,
            counted_by=list(rule.counted_by),
            listed=rule.listed,
        )
        for rule in (graph.expert_parallel if ep > 1 else ())
        for pattern in block_patterns(graph, rule.structures)
    ]
