"""One rank's share of `verify`: train the plan for some steps and compare after each.

Rank 0 trains alone first and leaves its losses and parameters in the job's folder. Every rank
then compares all that its stage holds, so a fault on one replica alone is seen too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from claw_plan.executor.batches import Source, make_source, own_slice
from claw_plan.executor.checkpoint_layout import parts_of
from claw_plan.executor.double_mode import DoubleMode
from claw_plan.executor.gradients import local
from claw_plan.executor.job import Job, Progress
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import ParallelModel, compile_plan
from claw_plan.executor.ranks import Rank
from claw_plan.executor.reduced_model import reduced
from claw_plan.executor.reference import (
    batch_for,
    reference_steps,
    without_dropout,
    without_functional_dropout,
)
from claw_plan.executor.replica_exchange import without_codec
from claw_plan.executor.verify_reasons import likely_reason
from claw_plan.executor.whole_model import DOUBLE, SINGLE
from claw_plan.planner.model_source import LoadedModel
from claw_plan.planner.plan import Plan
from claw_plan.planner.schedules import ASYNCHRONOUS
from claw_plan.profiles.files import write_atomic

FP64_TOLERANCE = 1e-10
"""Right plans differ by rounding only, some 1e-15 a step; the known faults by 1e-5 and more."""

FP32_LOSS_TOLERANCE = 1e-5
"""Right plans were seen to differ by up to 1.5e-6, the known faults by at least 4e-5."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The largest difference of one parameter on one rank after one step.

    `ranks` is how many differ in it at that step, `holders` how many hold a part of it. Where one
    rank alone differs, the fault is its own.
    """

    step: int
    rank: int
    parameter: str
    difference: float
    ranks: int = 1
    holders: int = 1


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One plan in one precision against one process; `first` is beyond the tolerance.

    `reason` is why, where a look at the model tells.
    """

    max_loss_diff: float
    max_param_diff: float
    first: Difference | None
    reason: str = ""


def verify_on_rank(job: Job, rank: Rank, progress: Progress) -> None:
    """Verifies each plan of the job; rank 0 writes `plan<i>.json` into the folder."""
    for index, path in enumerate(job.plans):
        plan, loaded = open_plan(path)
        plan = without_codec(plan)
        keep = job.keep_blocks[index] if job.keep_blocks else None
        if keep is not None:
            plan, loaded = reduced(plan, loaded, keep)
        results = {
            precision: _compare(plan, without_dropout(loaded), precision, job, rank, progress)
            for precision in (DOUBLE, SINGLE)
        }
        if rank.rank == 0:
            values = {name: dataclasses.asdict(result) for name, result in results.items()}
            write_atomic(result_path(job.folder, index), json.dumps(values))


def result_path(folder: Path, index: int) -> Path:
    """Where the comparison of the index-th plan lies."""
    return folder / f"plan{index}.json"


def _compare(
    plan: Plan, loaded: LoadedModel, precision: str, job: Job, rank: Rank, progress: Progress
) -> Comparison:
    mode = DoubleMode() if precision == DOUBLE else nullcontext()
    with without_functional_dropout(), mode:
        return _compare_inside(plan, loaded, precision, job, rank, progress)


def _compare_inside(
    plan: Plan, loaded: LoadedModel, precision: str, job: Job, rank: Rank, progress: Progress
) -> Comparison:
    folder = _reference(plan, loaded, precision, job, rank)
    compiled = compile_plan(plan, loaded, rank.device, precision=precision)
    source = _source(plan, loaded, job)
    losses, found = list[float](), list[dict[str, float]]()

    def look(step: int) -> None:
        found.append(_differences(compiled, _expected(folder, step)["parameters"]))

    if compiled.overlap is not None:
        compiled.overlap.after_update = look
    for step in range(job.steps):
        progress.step = step + 1
        batch = batch_for(source, step, precision)
        own = own_slice(batch, compiled.mesh.data_index, compiled.knobs.dp)
        loss = compiled.train_step({name: value.to(rank.device) for name, value in own.items()})
        if compiled.next_forward is not None:
            compiled.next_forward.settle()
        if compiled.overlap is None:
            losses.append(loss)
            look(step)
    compiled.settle()
    if compiled.overlap is not None:
        losses = compiled.overlap.losses
    loss_diff = max(
        abs(loss - _expected(folder, step)["loss"]) for step, loss in enumerate(losses)
    )
    everywhere: list[list[dict[str, float]]] = [[] for _ in range(rank.world_size)]
    dist.all_gather_object(everywhere, found)
    first = first_difference(everywhere, FP64_TOLERANCE) if precision == DOUBLE else None
    reason = ""
    if first is not None and rank.rank == 0:
        missing = first.holders - first.ranks
        reason = likely_reason(plan, loaded, precision, first.difference, missing)
    every = [value for steps in everywhere for step in steps for value in step.values()]
    return Comparison(
        max_loss_diff=loss_diff, max_param_diff=largest(every), first=first, reason=reason
    )


def _expected(folder: Path, step: int) -> dict[str, Any]:
    """Loss and parameters of one process after a step."""
    expected: dict[str, Any] = torch.load(folder / f"{step}.pt", mmap=True, weights_only=True)
    return expected


def _differences(compiled: ParallelModel, expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest difference of each parameter that this rank holds a part of, by name."""
    found: dict[str, float] = {}
    for name, parameter in compiled.parameters.items():
        own = local(parameter.detach()).cpu()
        for part in parts_of(compiled, name):
            difference = (part.of_local(own) - part.of_whole(expected[name])).abs().max().item()
            found[name] = largest([found.get(name, 0.0), difference])
    return found


def largest(values: Sequence[float]) -> float:
    """The largest; what is not a number is larger than any."""
    return max(values, key=lambda value: (value != value, value), default=0.0)


def first_difference(
    everywhere: Sequence[Sequence[dict[str, float]]], tolerance: float
) -> Difference | None:
    """What left the tolerance first: of the earliest step the largest, of equal ones the lowest
    rank. `everywhere` holds, for each rank and step, differences by parameter.
    """
    beyond = [
        (step, rank, name, value)
        for rank, steps in enumerate(everywhere)
        for step, by_name in enumerate(steps)
        for name, value in by_name.items()
        if not value <= tolerance
    ]
    if not beyond:
        return None
    step = min(step for step, *_ in beyond)
    now = [(rank, name, value) for s, rank, name, value in beyond if s == step]
    rank, name, value = max(now, key=lambda found: (found[2] != found[2], found[2], -found[0]))
    return Difference(
        step=step + 1,
        rank=rank,
        parameter=name,
        difference=value,
        ranks=sum(other == name for _, other, _ in now),
        holders=sum(name in steps[step] for steps in everywhere),
    )


def _source(plan: Plan, loaded: LoadedModel, job: Job) -> Source:
    """What `run` would train on; without data of one's own, example batches."""
    return make_source(plan, loaded, Path(job.data) if job.data else None)


def _reference(plan: Plan, loaded: LoadedModel, precision: str, job: Job, rank: Rank) -> Path:
    """The folder with one process's results; plans that train the same share it."""
    size, blocks = plan.knobs().microbatch_size, len(plan.blocks)
    delays = plan.schedule.name in ASYNCHRONOUS
    key = f"{loaded.path} {plan.model.build} {plan.training} {size} {blocks} {delays}"
    folder = job.folder / f"reference_{precision}_{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if rank.rank == 0 and not folder.exists():
        folder.mkdir()
        results = reference_steps(plan, loaded, _source(plan, loaded, job), job.steps, precision)
        for step, (loss, parameters) in enumerate(results):
            torch.save({"loss": loss, "parameters": parameters}, folder / f"{step}.pt")
    dist.barrier()
    return folder
