"""Trains asynchronous plans beside the recursion that they must equal, computed in one process.

Started for each rank by tests as `python rank_overlapping.py RANK WORLD_SIZE FOLDER`; the folder's
`jobs.json` lists what to train, and rank 0 writes for each what it found.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from claw_plan.executor.batches import ExampleSource, own_slice
from claw_plan.executor.checkpoint import Checkpointer
from claw_plan.executor.checkpoint_layout import parts_of
from claw_plan.executor.double_mode import DoubleMode
from claw_plan.executor.gradients import local
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import ParallelModel, compile_plan
from claw_plan.executor.reference import batch_for, without_dropout
from claw_plan.executor.whole_model import (
    AS_PLANNED,
    DOUBLE,
    SINGLE,
    build_whole,
    cast_floats,
    loss_of,
)
from claw_plan.planner.model_source import LoadedModel
from claw_plan.planner.plan import Plan

Weights = dict[str, torch.Tensor]

BF16 = "bfloat16"
"""As the plan has it; other precisions are those of `verify`."""


def make(plan: Plan, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if plan.training.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=plan.training.learning_rate)
    return torch.optim.AdamW(parameters, lr=plan.training.learning_rate)


def recursion(
    plan: Plan, loaded: LoadedModel, precision: str, steps: int, lrs: list[float]
) -> list[tuple[float, Weights]]:
    """W(t + 1) = W(t) - update(grad f(W(t - 1))): loss and weights after each step."""
    trained = build_whole(plan, loaded, SINGLE if precision == BF16 else precision)
    held = dict(trained.named_parameters())
    runs = copy.deepcopy(trained).bfloat16() if precision == BF16 else copy.deepcopy(trained)
    call, source, optimizer = (
        loss_of(loaded),
        ExampleSource(plan, loaded),
        make(plan, [*held.values()]),
    )
    size, replicas = plan.knobs().microbatch_size, plan.knobs().dp
    before = {name: parameter.detach().clone() for name, parameter in held.items()}
    found = []
    for step in range(steps):
        batch = batch_for(source, step, precision)
        if precision == BF16:
            batch = cast_floats(batch, torch.bfloat16)
        with torch.no_grad():
            for name, parameter in runs.named_parameters():
                parameter.copy_(before[name])
        before = {name: parameter.detach().clone() for name, parameter in held.items()}
        sums, losses = [], []
        for replica in range(replicas):
            own = own_slice(batch, replica, replicas)
            count = len(next(iter(own.values()))) // size
            added = {name: torch.zeros_like(parameter) for name, parameter in held.items()}
            for index in range(count):
                rows = {k: v[index * size : (index + 1) * size] for k, v in own.items()}
                loss = call(runs, rows)
                losses.append(loss.item() / (count * replicas))
                (loss / count).backward()
                for name, parameter in runs.named_parameters():
                    added[name] += parameter.grad
                runs.zero_grad()
            sums.append(added)
        for name, parameter in held.items():
            parameter.grad = sum(added[name] for added in sums) / replicas
        if plan.training.clip_norm is not None:
            nn.utils.clip_grad_norm_(held.values(), plan.training.clip_norm)
        optimizer.param_groups[0]["lr"] = lrs[step]
        optimizer.step()
        newest = {name: parameter.detach().clone() for name, parameter in held.items()}
        found.append((sum(losses), newest))
    return found


def difference(compiled: ParallelModel, expected: Weights) -> float:
    return max(
        (part.of_local(local(p.detach())) - part.of_whole(expected[name])).abs().max().item()
        for name, p in compiled.parameters.items()
        for part in parts_of(compiled, name)
    )


def trained(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    plan, loaded = open_plan(Path(job["plan"]))
    training = plan.training.model_copy(update=job.get("training", {}))
    plan, loaded = plan.model_copy(update={"training": training}), without_dropout(loaded)
    steps, drains, precision = job["steps"], job.get("drains", []), job["precision"]
    lr = plan.training.learning_rate
    lrs = [lr / (1 + step) if job.get("schedules") else lr for step in range(steps)]
    expected = recursion(plan, loaded, precision, steps, lrs)
    asked = AS_PLANNED if precision == BF16 else precision
    compiled = compile_plan(plan, loaded, torch.device("cpu"), precision=asked)
    source, differences, seen = ExampleSource(plan, loaded), list[float](), list[int]()

    def look(step: int) -> None:
        seen.append(step)
        differences.append(difference(compiled, expected[step][1]))

    losses: list[float] = []
    for step in range(steps):
        assert compiled.overlap is not None
        compiled.overlap.after_update = look
        for group in compiled.optimizer.param_groups:
            group["lr"] = lrs[step]
        batch = batch_for(source, step, precision)
        compiled.train_step(own_slice(batch, compiled.mesh.data_index, compiled.knobs.dp))
        if step in drains:
            compiled.settle()
        if step == job.get("saves"):
            at = folder / f"{Path(job['plan']).stem}-{precision}"
            compiled.settle()
            saver = Checkpointer(compiled, at)
            saver.save(step + 1)
            assert not saver.finish()
            losses += compiled.overlap.losses
            compiled = compile_plan(plan, loaded, torch.device("cpu"), precision=asked)
            Checkpointer(compiled, None).load(next(at.glob("step*")))
    compiled.settle()
    losses += compiled.overlap.losses
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, differences)
    return {
        "differences": everywhere,
        "losses": [a - b for a, (b, _) in zip(losses, expected, strict=True)],
        "updates": seen,
    }


def main(rank: int, world_size: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    found = []
    for job in json.loads((folder / "jobs.json").read_text()):
        with DoubleMode() if job["precision"] == DOUBLE else nullcontext():
            found.append(trained(job, folder))
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # threads of gloo may still run


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
