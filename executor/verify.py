"""`verify_plan`: does the plan train exactly like one process?

First in fp64, where losses and parameters must agree to 1e-10 (rounding is 1e-15), then losses in
fp32 to 1e-5. The data are those that `run` would take, and dropout modules are set to 0 for the
comparison. A model too large for one process of this host is compared with fewer blocks.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from claw_plan.executor.batches import make_source
from claw_plan.executor.job import VERIFY, Job
from claw_plan.executor.launch import start_ranks
from claw_plan.executor.local_ranks import WORKER
from claw_plan.executor.opened_plan import device_type_of, open_plan
from claw_plan.executor.reduced_model import blocks_to_keep
from claw_plan.executor.verify_rank import FP32_LOSS_TOLERANCE, FP64_TOLERANCE, result_path
from claw_plan.executor.whole_model import DOUBLE, SINGLE
from claw_plan.planner.errors import PlanError
from claw_plan.planner.plan import Plan, load_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """The largest differences from one process. `first_difference` is None when `ok`.

    `blocks` is how many were left of a model too large for this host, None where all were. `codec`
    is the plan's, which was left out: with it no plan trains exactly like one process.
    """

    ok: bool
    steps: int
    fp64_max_loss_diff: float
    fp64_max_param_diff: float
    fp32_max_loss_diff: float
    first_difference: str | None
    blocks: int | None = None
    codec: str = "none"


def verify_plan(plan_path: Path, steps: int = 5, *, data: Path | None = None) -> VerifyResult:
    """Compares the plan with one process over `steps` optimizer steps."""
    return verify_plans([plan_path], steps, data=data)[0]


def verify_plans(
    plan_paths: Sequence[Path],
    steps: int = 5,
    *,
    data: Path | None = None,
    worker: Sequence[str] = WORKER,
) -> list[VerifyResult]:
    """The same for several plans of one size, in one set of processes."""
    if steps < 1:
        raise PlanError(f"verify takes at least one step, but got {steps=}")
    plans = [load_plan(path) for path in plan_paths]
    sizes = [plan.knobs().num_devices for plan in plans]
    if len(set(sizes)) != 1:
        raise PlanError(f"plans verified together use equally many devices, but got {sizes}")
    if data is not None:  # says what is wrong with it before any rank starts
        for path in plan_paths:
            make_source(*open_plan(path), data)
    folder = Path(tempfile.mkdtemp(prefix="claw-plan-verify-"))
    job = Job(
        kind=VERIFY,
        folder=folder,
        plans=tuple(path.resolve() for path in plan_paths),
        steps=steps,
        device_type=_device_type(plans),
        data=str(data.resolve()) if data is not None else "",
        keep_blocks=tuple(blocks_to_keep(plan, plan.model.parameters) for plan in plans),
    )
    start_ranks(job, sizes[0], worker=worker)
    results = [_result(job, index) for index in range(len(plan_paths))]
    shutil.rmtree(folder)  # after an error it stays: the message names a log in it
    return results


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
        first = _said(double["first"], double["reason"])
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
        blocks=job.keep_blocks[index],
        codec=load_plan(job.plans[index]).knobs().codec,
    )


def _said(first: Mapping[str, Any], reason: str) -> str:
    alone = first["ranks"] < first["holders"]
    where = f"rank {first['rank']}" + (" alone" if alone and first["ranks"] == 1 else "")
    text = (
        f"{first['parameter']} on {where} after step {first['step']}: "
        f"{first['difference']:.2e} in fp64"
    )
    return f"{text}; {reason}" if reason else text
