"""`verify_plan`: does the plan train exactly like one process?

First in fp64, where losses and parameters must agree to 1e-10 (rounding is 1e-15), then losses in
fp32 to 1e-5. Example batches are trained on, and dropout modules are set to 0 for the comparison.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from claw_plan.executor.job import VERIFY, Job
from claw_plan.executor.launch import start_ranks
from claw_plan.executor.local_ranks import WORKER
from claw_plan.executor.opened_plan import device_type_of
from claw_plan.executor.verify_rank import FP32_LOSS_TOLERANCE, FP64_TOLERANCE, result_path
from claw_plan.executor.whole_model import DOUBLE, SINGLE
from claw_plan.planner.errors import PlanError
from claw_plan.planner.plan import Plan, load_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """The largest differences from one process. `first_difference` is None when `ok`."""

    ok: bool
    steps: int
    fp64_max_loss_diff: float
    fp64_max_param_diff: float
    fp32_max_loss_diff: float
    first_difference: str | None


def verify_plan(plan_path: Path, steps: int = 5) -> VerifyResult:
    """Compares the plan with one process over `steps` optimizer steps."""
    return verify_plans([plan_path], steps)[0]


def verify_plans(
    plan_paths: Sequence[Path], steps: int = 5, *, worker: Sequence[str] = WORKER
) -> list[VerifyResult]:
    """The same for several plans of one size, in one set of processes."""
    if steps < 1:
        raise PlanError(f"verify takes at least one step, but got {steps=}")
    plans = [load_plan(path) for path in plan_paths]
    sizes = [plan.knobs().num_devices for plan in plans]
    if len(set(sizes)) != 1:
        raise PlanError(f"plans verified together use equally many devices, but got {sizes}")
    with tempfile.TemporaryDirectory(prefix="claw-plan-verify-") as folder:
        job = Job(
            kind=VERIFY,
            folder=Path(folder),
            plans=tuple(path.resolve() for path in plan_paths),
            steps=steps,
            device_type=_device_type(plans),
        )
        start_ranks(job, sizes[0], worker=worker)
        return [_result(job, index) for index in range(len(plan_paths))]


def _device_type(plans: Sequence[Plan]) -> str:
    """The plans' own devices where there are enough here; any plan can be verified on CPUs."""
    wanted = {device_type_of(plan) for plan in plans}
    fits = torch.cuda.is_available() and all(
        plan.knobs().num_devices <= torch.cuda.device_count() for plan in plans
    )
    return "cuda" if wanted == {"cuda"} and fits else "cpu"


def _result(job: Job, index: int) -> VerifyResult:
    values = json.loads(result_path(job.folder, index).read_text())
    double, single = values[DOUBLE], values[SINGLE]
    first = None
    if double["first"] is not None:
        first = "{parameter} on rank {rank} after step {step}: {difference:.2e} in fp64".format(
            **double["first"]
        )
    elif not double["max_loss_diff"] <= FP64_TOLERANCE:
        first = f"the loss, by {double['max_loss_diff']:.2e} in fp64"
    elif not single["max_loss_diff"] <= FP32_LOSS_TOLERANCE:
        first = f"the loss, by {single['max_loss_diff']:.2e} in fp32"
    return VerifyResult(
        ok=first is None,
        steps=job.steps,
        fp64_max_loss_diff=double["max_loss_diff"],
        fp64_max_param_diff=double["max_param_diff"],
        fp32_max_loss_diff=single["max_loss_diff"],
        first_difference=first,
    )
