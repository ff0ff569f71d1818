"""A plan file with the model it names, checked to be the one that was planned."""

from __future__ import annotations

from pathlib import Path

from claw_plan.planner.model_source import LoadedModel
from claw_plan.planner.plan import Plan, load_plan
from claw_plan.planner.plan_check import check_plan, model_of_plan
from claw_plan.profiles.cluster_file import cluster_from_mapping


def open_plan(path: Path) -> tuple[Plan, LoadedModel]:
    """A plan and its model, found beside it.

    Raises PlanError when the plan's parts contradict each other or the model file has changed,
    and for a composition that is not proven.
    """
    plan = load_plan(path)
    check_plan(plan, str(path))
    model = model_of_plan(plan, path)
    model.example_batch(1, plan.training.seq_len)  # says what is wrong before any rank starts
    return plan, model


def device_type_of(plan: Plan) -> str:
    """What torch calls the devices of the plan's cluster."""
    kind = cluster_from_mapping(plan.cluster, "cluster").nodes[0].device.kind
    return "cpu" if kind == "cpu" else "cuda"
