"""`parallelize`: a plan for the training script that somebody already has.

The user's own model object, with the weights it has, becomes this rank's part of the plan; the
script stays the user's, started by torchrun, srun or by hand. What can go wrong silently there is
checked first: another model than the planned one, ranks with different weights, rows of a batch
that are not this rank's.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from claw_plan.executor.batches import own_slice
from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.opened_plan import device_type_of
from claw_plan.executor.parallel_model import ParallelModel, compile_plan
from claw_plan.executor.ranks import Rank, join
from claw_plan.executor.run import check_machine
from claw_plan.executor.torch_private import fake_mode
from claw_plan.executor.whole_model import AS_PLANNED, DOUBLE
from claw_plan.planner.fake_build import build_fake
from claw_plan.planner.model_source import Batch, LoadedModel
from claw_plan.planner.plan import Plan, load_plan
from claw_plan.planner.plan_check import check_plan, model_of_plan
from claw_plan.planner.schedules import ASYNCHRONOUS

MakeOptimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


class PlannedModel(nn.Module):
    """This rank's part of the user's model. `model(**batch)` answers with the loss of these rows.

    Rows are this rank's: number `data_rank` of `data_ranks` equal shares of the global batch.
    Ranks of one tensor-parallel group or pipeline are given the same rows.
    """

    def __init__(self, compiled: ParallelModel) -> None:
        super().__init__()
        self.module = compiled.module
        self.compiled = compiled
        self._in_step = False
        compiled.optimizer.register_step_pre_hook(self._before_step)

    @property
    def data_rank(self) -> int:
        """Which share of the global batch is this rank's."""
        return self.compiled.mesh.data_index

    @property
    def data_ranks(self) -> int:
        """Number of shares; with `data_rank` it is what DistributedSampler asks for."""
        return self.compiled.knobs.dp

    def share_of(self, batch: Batch) -> Batch:
        """This rank's rows of a global batch."""
        return own_slice(batch, self.data_rank, self.data_ranks)

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        """The mean loss of the rows given; its backward leaves complete gradients behind.

        Raises ExecutionError where a loop of one's own cannot do what the plan says.
        """
        if self.compiled.knobs.pp > 1:
            raise ExecutionError(
                "the plan has pipeline stages, whose microbatches run in turns: call step(batch), "
                "or plan again with --fix pp=1"
            )
        if self.compiled.loss_scale is not None and torch.is_grad_enabled():
            raise ExecutionError(
                "the plan trains in float16 and scales the loss: call step(batch), or plan again "
                "with --precision bfloat16"
            )
        loss: torch.Tensor = self.module(**_to(batch, self.compiled.device))
        return loss

    def train_step(self, batch: Batch) -> float:
        """`step` of `parallelize`."""
        training = self.compiled.plan.training
        rows, wanted = len(next(iter(batch.values()))), training.global_batch // self.data_ranks
        if rows != wanted:
            raise ExecutionError(
                f"step takes this rank's {wanted} rows of the plan's global batch of "
                f"{training.global_batch} (share {self.data_rank} of {self.data_ranks}), but got "
                f"{rows}; cut a global batch with model.share_of(batch), or sample with "
                "num_replicas=model.data_ranks, rank=model.data_rank"
            )
        self._in_step = True
        try:
            return self.compiled.train_step(_to(batch, self.compiled.device))
        finally:
            self._in_step = False

    def _before_step(self, *_: Any) -> None:
        """Completes the gradients of a loop of the user's own; `step` has done it already."""
        if not self._in_step:
            self.compiled.finish_gradients()
            self.compiled.clip_gradients()
            self.compiled.clip_gradients()


def parallelize(
    plan: Plan | Path | str,
    model: nn.Module,
    *,
    optimizer: MakeOptimizer | None = None,
) -> tuple[PlannedModel, torch.optim.Optimizer, Callable[[Batch], float]]:
    """This rank's part of the plan, for a script of one's own; every rank calls it.

    `plan` is a plan.yaml or a Plan (whose model file is looked for in the
    working directory). `optimizer` makes one for this rank's parameters; without it, it is the
    model file's, else the plan's. `step(batch)` trains on this rank's rows and answers with the
    loss of the global batch; without a pipeline, `model(**batch)`, `backward()` and
    `optimizer.step()` of a loop of one's own do the same, divided losses of several microbatches
    included. The model given is used up.

    Raises ExecutionError and PlanError with one line when ranks, devices or the model are not
    those of the plan.
    """
    path = Path(plan) if isinstance(plan, str | Path) else Path("plan.yaml").absolute()
    plan = load_plan(path) if isinstance(plan, str | Path) else plan
    check_plan(plan, str(path))
    if plan.schedule.name in ASYNCHRONOUS:
        raise ExecutionError(
            f"schedule={plan.schedule.name} overlaps steps, so that a step's loss is not known at "
            "its end; train with `claw-plan run`, or plan again with --fix schedule=1F1B"
        )
    loaded = model_of_plan(plan, path)
    rank = _meet(plan)
    device = rank.device
    _check_place(model, device)
    _check_parameters(model, loaded)
    _check_equal_on_ranks(model, device)
    is_double = all(parameter.dtype is torch.float64 for parameter in model.parameters())
    own = dataclasses.replace(loaded, make=lambda: model, optimizer=optimizer or loaded.optimizer)
    with torch.random.fork_rng(devices=[]):
        compiled = compile_plan(plan, own, device, precision=DOUBLE if is_double else AS_PLANNED)
    compiled.next_forward = None  # a loop of one's own steps the optimizer where it likes
    planned = PlannedModel(compiled)
    return planned, compiled.optimizer, planned.train_step


def _meet(plan: Plan) -> Rank:
    """This process among the others: the group that is there, else one by the environment."""
    kind, wanted = device_type_of(plan), plan.knobs().num_devices
    rank = Rank.from_environment(device_type=kind)
    if dist.is_initialized():
        rank = _joined_already(kind, rank)
    elif rank is None and wanted > 1:
        raise ExecutionError(
            f"the plan trains on {wanted} ranks, but this script runs alone; start it with "
            f"torchrun --nproc-per-node {wanted} SCRIPT, or with srun"
        )
    if rank is not None and rank.world_size != wanted:
        raise ExecutionError(
            f"the plan trains on {wanted} ranks, but {rank.world_size} were started; start as "
            f"many, or plan again for {rank.world_size} devices"
        )
    rank = rank or Rank(rank=0, world_size=1, local_rank=0, local_world_size=1, device_type=kind)
    check_machine(plan, rank)
    if not dist.is_initialized():
        _join(rank)
    return rank


def _joined_already(kind: str, known: Rank | None) -> Rank:
    local_rank, local_size = dist.get_rank(), dist.get_world_size()
    if known is not None:
        local_rank, local_size = known.local_rank, known.local_world_size
    elif kind != "cpu" and torch.cuda.is_available():
        local_rank = torch.cuda.current_device()
    return Rank(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=local_rank,
        local_world_size=local_size,
        device_type=kind,
    )


def _join(rank: Rank) -> None:
    if rank.world_size > 1 or "MASTER_ADDR" in os.environ:
        join(rank)
        return
    backend = "gloo" if rank.device_type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def _check_place(model: nn.Module, device: torch.device) -> None:
    """Weights may wait on the CPU or be where they will train, nowhere else."""
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cpu" and parameter.device != device:
            advice = (
                "build the model with its weights"
                if parameter.is_meta
                else f"leave the model on the CPU, or move it to {device}"
            )
            raise ExecutionError(
                f"{name} is on {parameter.device}, but this rank trains on {device}; {advice}"
            )


def _check_parameters(model: nn.Module, loaded: LoadedModel) -> None:
    """The model given has the parameters of the model that was planned."""
    with torch.random.fork_rng(devices=[]):
        planned = {n: p.shape for n, p in build_fake(loaded, fake_mode()).named_parameters()}
    given = {name: parameter.shape for name, parameter in model.named_parameters()}
    for name in planned | given:
        ours, theirs = _shape(planned, name), _shape(given, name)
        if ours != theirs:
            raise ExecutionError(
                f"{loaded.path.name} was planned with {name} {ours}, but the model given has "
                f"{name} {theirs}; pass the model that was planned, or plan this one"
            )


def _shape(shapes: Mapping[str, torch.Size], name: str) -> str:
    return f"of shape {list(shapes[name])}" if name in shapes else "not at all"


def _check_equal_on_ranks(model: nn.Module, device: torch.device) -> None:
    """Nothing makes differing replicas equal later, and every one would train its own model."""
    named = list(model.named_parameters())
    sums = torch.stack([_bits(parameter) for _, parameter in named])
    least, most = sums.to(device), sums.to(device, copy=True)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    differ = (least != most).nonzero().flatten().tolist()
    if differ:
        raise ExecutionError(
            f"{named[differ[0]][0]} has other values on other ranks; give every rank the same "
            "weights: the same torch.manual_seed before building, or the same checkpoint"
        )


def _bits(parameter: nn.Parameter) -> torch.Tensor:
    """A sum of all bits that does not depend on the order, exact on every machine."""
    bits = parameter.detach().contiguous().view(-1).view(torch.uint8)
    words = bits if bits.numel() % 4 else bits.view(torch.int32)
    return words.sum(dtype=torch.int64).cpu()


def _to(batch: Batch, device: torch.device) -> Batch:
    return {name: value.to(device) for name, value in batch.items()}
