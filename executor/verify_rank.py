"""One rank's share of `verify`: train the plan for some steps and compare after each.

Rank 0 trains alone first and leaves its losses and parameters in the job's folder. Every rank
then compares all that its stage holds, so a fault on one replica alone is seen too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from claw_plan.executor.batches import ExampleSource, own_slice
from claw_plan.executor.checkpoint_layout import box_of, divided_as
from claw_plan.executor.double_mode import DoubleMode
from claw_plan.executor.job import Job, Progress
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import ParallelModel, compile_plan
from claw_plan.executor.ranks import Rank
from claw_plan.executor.reference import batch_for, reference_steps, without_dropout
from claw_plan.executor.whole_model import DOUBLE, SINGLE
from claw_plan.planner.model_source import LoadedModel
from claw_plan.planner.plan import Plan
from claw_plan.profiles.files import write_atomic

FP64_TOLERANCE = 1e-10
"""Right plans differ by rounding only, some 1e-15 a step; the known faults by 1e-5 and more."""

FP32_LOSS_TOLERANCE = 1e-5
"""Right plans were seen to differ by up to 1.5e-6, the known faults by at least 4e-5."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The largest difference of one parameter on one rank after one step."""

    step: int
    rank: int
    parameter: str
    difference: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One plan in one precision against one process; `first` is beyond the tolerance."""

    max_loss_diff: float
    max_param_diff: float
    first: Difference | None


def verify_on_rank(job: Job, rank: Rank, progress: Progress) -> None:
    """Verifies each plan of the job; rank 0 writes `plan<i>.json` into the folder."""
    for index, path in enumerate(job.plans):
        plan, loaded = open_plan(path)
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
    with DoubleMode() if precision == DOUBLE else nullcontext():
        return _compare_inside(plan, loaded, precision, job, rank, progress)


def _compare_inside(
    plan: Plan, loaded: LoadedModel, precision: str, job: Job, rank: Rank, progress: Progress
) -> Comparison:
    folder = _reference(plan, loaded, precision, job, rank)
    compiled = compile_plan(plan, loaded, rank.device, precision=precision)
    source = ExampleSource(plan, loaded)
    loss_diff, found = 0.0, list[Difference]()
    for step in range(job.steps):
        progress.step = step + 1
        batch = batch_for(source, step, precision)
        loss = compiled.train_step(own_slice(batch, compiled.mesh.data_index, compiled.knobs.dp))
        expected = torch.load(folder / f"{step}.pt", mmap=True, weights_only=True)
        loss_diff = max(loss_diff, abs(loss - expected["loss"]))
        found.append(_largest(compiled, expected["parameters"], step + 1, rank))
    everywhere: list[list[Difference]] = [[] for _ in range(rank.world_size)]
    dist.all_gather_object(everywhere, found)
    all_found = [difference for differences in everywhere for difference in differences]
    tolerance = FP64_TOLERANCE if precision == DOUBLE else float("inf")
    beyond = [d for d in all_found if not d.difference <= tolerance]
    return Comparison(
        max_loss_diff=loss_diff,
        max_param_diff=max(difference.difference for difference in all_found),
        first=min(beyond, key=lambda d: (d.step, -d.difference, d.rank), default=None),
    )


def _largest(
    compiled: ParallelModel, expected: dict[str, torch.Tensor], step: int, rank: Rank
) -> Difference:
    largest, where = 0.0, ""
    for name, value in whole_parameters(compiled):
        difference = (value.cpu() - expected[name]).abs().max().item()
        if not difference <= largest:  # not a number counts as a difference
            largest, where = difference, name
    return Difference(step=step, rank=rank.rank, parameter=where, difference=largest)


def _reference(plan: Plan, loaded: LoadedModel, precision: str, job: Job, rank: Rank) -> Path:
    """The folder with one process's results; plans that train the same share it."""
    key = f"{loaded.path} {plan.model.build} {plan.training} {plan.knobs().microbatch_size}"
    folder = job.folder / f"reference_{precision}_{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if rank.rank == 0 and not folder.exists():
        folder.mkdir()
        results = reference_steps(plan, loaded, job.steps, precision)
        for step, (loss, parameters) in enumerate(results):
            torch.save({"loss": loss, "parameters": parameters}, folder / f"{step}.pt")
    dist.barrier()
    return folder


def whole_parameters(compiled: ParallelModel) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in the model, whole value) of every parameter this rank's stage holds.

    All ranks of the stage must iterate together: shards are gathered on the way.
    """
    for name, parameter in compiled.parameters.items():
        value = parameter.detach()
        if isinstance(value, DTensor):
            value = value.full_tensor()
        divided, known = compiled.tensor_parallel, divided_as(compiled, name)
        if divided is not None and known is not None:
            value = divided.full_parameter(known, gather_over(value, compiled.mesh.group("tp")))
        yield name, value


def gather_over(value: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The value of every rank of the group, in rank order; they may differ in size."""
    shapes: list[torch.Size] = [value.shape] * dist.get_world_size(group)
    dist.all_gather_object(shapes, value.shape, group=group)
    largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    padded = value.new_zeros(largest)
    box_of(padded, (0,) * value.ndim, value.shape).copy_(value)
    parts = [torch.empty_like(padded) for _ in shapes]
    dist.all_gather(parts, padded, group=group)
    return [
        box_of(part, (0,) * value.ndim, shape) for part, shape in zip(parts, shapes, strict=True)
    ]
