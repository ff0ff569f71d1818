from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn as nn

from claw_plan.executor.model_check import check_model
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import compile_plan
from claw_plan.executor.ranks import Rank
from claw_plan.executor.whole_model import build_whole
from claw_plan.planner.errors import PlanError
from claw_plan.planner.plan import Plan, PlanPrediction, PlanTie

TIE = ("transformer.wte.weight", "lm_head.weight")


def as_written(plan: Plan, parameters: int) -> Plan:
    """With all that planning writes down of the model."""
    prediction = PlanPrediction(
        step_time_ms=1.0, interval_ms=(1.0, 1.0), samples_per_s=1.0, tokens_per_s=None, mfu=None,
        memory_gib=[1.0], profile="catalogue", search={},
    )  # fmt: skip
    return plan.model_copy(
        update={
            "prediction": prediction,
            "tied": [PlanTie(parameters=list(TIE), stages=[0])],
            "model": plan.model.model_copy(update={"parameters": parameters}),
        }
    )


@pytest.fixture
def planned(tiny_plan: Callable[..., Path]) -> tuple[Plan, nn.Module]:
    plan, loaded = open_plan(tiny_plan("checked"))
    model = build_whole(plan, loaded)
    return as_written(plan, sum(p.numel() for p in model.parameters())), model


def refused(plan: Plan, model: nn.Module) -> str:
    with pytest.raises(PlanError) as raised:
        check_model(plan, model)
    said = str(raised.value)
    assert "another model than the one that was planned: " in said and said.endswith(
        "; plan again"
    )
    return said


def test_the_model_that_was_planned_is_taken(planned: tuple[Plan, nn.Module]) -> None:
    check_model(*planned)


def test_a_tie_that_was_loosed_is_named(planned: tuple[Plan, nn.Module]) -> None:
    plan, model = planned
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    assert "lm_head.weight and transformer.wte.weight are not one parameter" in refused(
        plan, model
    )


def test_a_new_tie_is_named(planned: tuple[Plan, nn.Module]) -> None:
    plan, model = planned
    blocks = model.transformer.h
    blocks[1].mlp.c_fc.weight = blocks[0].mlp.c_fc.weight
    said = refused(plan, model)
    assert "h.0.mlp.c_fc.weight and transformer.h.1.mlp.c_fc.weight are one parameter" in said


def test_blocks_and_ends_that_are_gone_are_named(planned: tuple[Plan, nn.Module]) -> None:
    plan, model = planned
    del model.transformer.h[3]
    assert "it has no module transformer.h.3" in refused(plan, model)


def test_tables_of_another_size_are_named(planned: tuple[Plan, nn.Module]) -> None:
    plan, model = planned
    model.lm_head.weight = model.transformer.wte.weight = nn.Parameter(torch.zeros(62, 32))
    said = refused(plan, model)
    assert "has 62 rows, and 61 were to be divided" in said


def test_another_count_of_parameters_is_named(planned: tuple[Plan, nn.Module]) -> None:
    plan, model = planned
    count = plan.model.parameters
    model.transformer.ln_e = nn.LayerNorm(32)
    assert f"it has {count + 64} parameters, and {count} were planned" in refused(plan, model)


def test_a_plan_written_by_hand_may_leave_ties_out(tiny_plan: Callable[..., Path]) -> None:
    plan, loaded = open_plan(tiny_plan("by-hand"))
    assert not plan.tied and plan.model.parameters == 1
    check_model(plan, build_whole(plan, loaded))


def test_it_is_asked_before_anything_is_divided(
    planned: tuple[Plan, nn.Module], tiny_plan: Callable[..., Path], alone: Rank
) -> None:
    _, loaded = open_plan(tiny_plan("checked"))
    other = planned[0].model_copy(update={"tied": []})
    with pytest.raises(PlanError, match="are one parameter; plan again"):
        compile_plan(other, loaded, alone.device)
