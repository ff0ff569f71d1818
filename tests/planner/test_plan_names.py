"""Modules of all blocks under one name."""

from __future__ import annotations

from dataclasses import replace

from claw_plan.planner.graph import ExpertRule, ModelGraph, Unit
from claw_plan.planner.plan import PlanExpertParallel
from claw_plan.planner.plan_names import block_patterns, expert_rules


def graph(*structures: int) -> ModelGraph:
    blocks = [Unit(name=f"h.{i}", modules=(), structure=s) for i, s in enumerate(structures)]
    ends = [Unit(name=name, modules=(), structure=9) for name in ("prologue", "epilogue")]
    return ModelGraph(
        name="m", fingerprint="", parameters=(), buffer_bytes=0,
        units=(ends[0], *blocks, ends[1]), costs={},
    )  # fmt: skip


def test_all_blocks_of_a_container_have_one_name() -> None:
    assert block_patterns(graph(0, 0, 1), (0, 1)) == ["h[*]"]
    assert block_patterns(graph(0, 0, 1), ()) == ["h[*]"]


def test_where_some_are_unlike_each_has_its_own() -> None:
    assert block_patterns(graph(0, 1, 1), (1,)) == ["h.1", "h.2"]


def test_experts_are_named_where_ranks_share_them() -> None:
    rule = ExpertRule(module="moe", experts=8, counted_by=("number",), structures=(0,))
    model = replace(graph(0, 0), expert_parallel=(rule,))
    assert expert_rules(model, 1) == []
    assert expert_rules(model, 4) == [
        PlanExpertParallel(modules="h[*].moe", experts=8, counted_by=["number"])
    ]
