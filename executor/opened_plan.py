"""A plan file with the model it names, checked to be the one that was planned."""

from __future__ import annotations

from pathlib import Path

from claw_plan.planner.errors import PlanError
from claw_plan.planner.model_source import LoadedModel, load_model
from claw_plan.planner.plan import Plan, load_plan
from claw_plan.planner.supported import refusal


def open_plan(path: Path) -> tuple[Plan, LoadedModel]:
    """A plan and its model, found beside it.

    Raises PlanError when the model file has changed, or for a composition that is not proven.
    """
    plan = load_plan(path)
    knobs = plan.knobs()
    if reason := refusal(knobs):
        raise PlanError(f"{path}: {reason}")
    count = knobs.num_microbatches(plan.training.global_batch)
    if plan.schedule.num_microbatches != count or len(plan.stages) != knobs.pp:
        raise PlanError(
            f"{path}: the candidate makes {knobs.pp} stages and {count} microbatches, but the "
            f"plan has {len(plan.stages)} and {plan.schedule.num_microbatches}; plan again with "
            "--fix for the knobs you changed"
        )
    file = path.parent / plan.model.file
    loaded = load_model(file, build=plan.model.build, inputs=plan.model.inputs)
    if loaded.sha256 != plan.model.sha256:
        raise PlanError(
            f"{path}: {plan.model.file} is not the file that was planned (its hash differs); "
            "plan again, so that times and memory are those of this model"
        )
    return plan, loaded
