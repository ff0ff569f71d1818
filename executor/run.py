"""`run_plan`: trains with a plan, on processes of this machine or on ranks that already run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from claw_plan.executor.batches import make_source
from claw_plan.executor.checkpoint_options import CheckpointOptions
from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.job import TRAIN, Job, end_together
from claw_plan.executor.launch import start_ranks
from claw_plan.executor.opened_plan import device_type_of, open_plan
from claw_plan.executor.ranks import Rank, join, take_core
from claw_plan.executor.run_files import RunResult, make_run_folder, read_result, write_run
from claw_plan.executor.train import STEPS_FILE, OnStep, train
from claw_plan.planner.plan import Plan
from claw_plan.profiles.cluster_file import cluster_from_mapping
from claw_plan.profiles.errors import InputError

RANKS_PER_CORE = 8
"""More processes a core only wait for each other, and each holds 0.3 GiB of libraries."""


def run_plan(
    plan_path: Path,
    steps: int,
    *,
    data: Path | None = None,
    runs: Path = Path("runs"),
    checkpoints: CheckpointOptions | None = None,
    on_step: OnStep = lambda line: None,
) -> RunResult | None:
    """Trains for `steps` optimizer steps, those before a resumed checkpoint counted, and writes
    runs/<id>/.

    Under torchrun or srun every rank calls it, and all but rank 0 get None. Raises PlanError and
    InputError for what is wrong with plan, model or data, ExecutionError when a rank fails.
    """
    if steps < 1:
        raise InputError(f"--steps is at least 1, but got {steps}")
    if data is not None and not data.is_file():
        raise InputError(f"--data {data} is not a file; give any text file")
    plan, loaded = open_plan(plan_path)
    checkpoints = (checkpoints or CheckpointOptions()).checked(steps, runs)
    if data is not None:
        make_source(plan, loaded, data)  # says what is wrong with it before any rank starts
    rank = Rank.from_environment(device_type=device_type_of(plan))
    check_machine(plan, rank)
    if rank is not None:
        return _run_joined(plan_path, steps, data, runs, checkpoints, rank, on_step)
    folder = make_run_folder(runs, plan_path)
    job = _job(folder, steps, data, device_type_of(plan), checkpoints)
    tail = _Tail(folder / STEPS_FILE, on_step)
    try:
        start_ranks(job, plan.knobs().num_devices, watch=tail.read)
    except KeyboardInterrupt:
        if not (folder / STEPS_FILE).exists():  # nothing was learned that a person may want
            shutil.rmtree(folder, ignore_errors=True)
        raise
    tail.read()
    return read_result(folder)


def check_machine(plan: Plan, rank: Rank | None) -> None:
    """A plan for accelerators runs where they are, one rank each; else ExecutionError."""
    if device_type_of(plan) == "cpu":
        ranks, most = plan.knobs().num_devices, RANKS_PER_CORE * (os.cpu_count() or 1)
        if rank is None and ranks > most:
            raise ExecutionError(
                f"the plan starts {ranks} processes on this machine's {os.cpu_count()} cores; at "
                f"most {most} make sense: plan with fewer devices, or start it with torchrun"
            )
        return
    if not torch.cuda.is_available():
        device = cluster_from_mapping(plan.cluster, "cluster").nodes[0].device
        raise ExecutionError(
            f"the plan is for {device.name}, but this machine has no GPU; run it there, or plan "
            "for this machine with --cluster cpu"
        )
    wanted, present = plan.knobs().num_devices, torch.cuda.device_count()
    if rank is None and wanted > present:
        raise ExecutionError(
            f"the plan uses {wanted} GPUs and this machine has {present}; start `claw-plan run` "
            f"on all nodes with torchrun or srun, {wanted} ranks together"
        )


def _job(
    folder: Path, steps: int, data: Path | None, device_type: str, checkpoints: CheckpointOptions
) -> Job:
    return Job(
        kind=TRAIN,
        folder=folder.resolve(),
        plans=((folder / "plan.yaml").resolve(),),
        steps=steps,
        device_type=device_type,
        data=str(data.resolve()) if data is not None else "",
        **checkpoints.job_fields(folder),
    )


def _run_joined(
    plan_path: Path,
    steps: int,
    data: Path | None,
    runs: Path,
    checkpoints: CheckpointOptions,
    rank: Rank,
    on_step: OnStep,
) -> RunResult | None:
    take_core(rank)
    join(rank)
    folders: list[object] = [
        str(make_run_folder(runs, plan_path).resolve()) if rank.rank == 0 else None
    ]
    dist.broadcast_object_list(folders)
    folder = Path(str(folders[0]))
    job = _job(folder, steps, data, rank.device_type, checkpoints)
    with end_together(job.folder, rank.rank) as progress:
        records = train(job, rank, progress, on_step)
        result = write_run(folder, records, rank) if rank.rank == 0 else None
        dist.barrier()
        dist.destroy_process_group()
    return result


class _Tail:
    """Reads the lines that were added to a file since the last look."""

    def __init__(self, path: Path, on_line: OnStep) -> None:
        self._path, self._on_line, self._read = path, on_line, 0

    def read(self) -> None:
        if not self._path.exists() or self._path.stat().st_size == self._read:
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            self._on_line(json.loads(line))
