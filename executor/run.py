"""`run_plan`: trains with a plan, on processes of this machine or on ranks that already run."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from claw_plan.executor.batches import make_source
from claw_plan.executor.checkpoint_folder import checkpoints_in
from claw_plan.executor.checkpoint_options import CheckpointOptions
from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.exchange_refusal import refuse_exchange
from claw_plan.executor.job import TRAIN, Job, Progress, end_together
from claw_plan.executor.launch import HERE, Launch, say_all, start_here
from claw_plan.executor.launch_hosts import hosts_for, start_on_hosts
from claw_plan.executor.opened_plan import device_type_of, open_plan
from claw_plan.executor.placement import check_count
from claw_plan.executor.preflight import PREFLIGHT_FILE, preflight
from claw_plan.executor.rank_work import among_others, meet_others, set_environment, told_by_rank_0
from claw_plan.executor.ranks import Rank
from claw_plan.executor.replica_exchange import options_of, warmup_note
from claw_plan.executor.run_files import RunResult, make_run_folder, read_result, write_run
from claw_plan.executor.train import STEPS_FILE, OnStep, train
from claw_plan.planner.plan import Plan, load_plan
from claw_plan.profiles.cluster_file import cluster_from_mapping
from claw_plan.profiles.errors import InputError, Interrupted

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
    launch: Launch = HERE,
) -> RunResult | None:
    """Trains for `steps` optimizer steps, those before a resumed checkpoint counted, and writes
    runs/<id>/.

    Under torchrun, srun or mpirun every rank calls it, and all but rank 0 get None. Raises
    PlanError and InputError for what is wrong with plan, model or data, ExecutionError when a
    rank fails, Interrupted when the ranks ended early because they were asked to.
    """
    if steps < 1:
        raise InputError(f"--steps is at least 1, but got {steps}")
    if data is not None and not data.is_file():
        raise InputError(f"--data {data} is not a file; give any text file")
    plan, loaded = open_plan(plan_path)
    refuse_exchange(plan, loaded, options_of(launch.selector, launch.checks_buckets))
    checkpoints = (checkpoints or CheckpointOptions()).checked(steps, runs)
    if data is not None:
        make_source(plan, loaded, data)  # says what is wrong with it before any rank starts
    rank = Rank.from_environment(device_type=device_type_of(plan))
    if (rank is None or rank.rank == 0) and (note := warmup_note(plan, loaded, steps)):
        launch.say(note)
    make_job = partial(_job, plan, steps, data, checkpoints, launch)
    if rank is not None:
        check_machine(plan, rank)
        return _run_joined(plan_path, plan, make_job, runs, rank, on_step, launch)
    hosts = hosts_for(plan, launch.hostfile)
    if not hosts:
        check_machine(plan, None)
    job = make_job(make_run_folder(runs, plan_path))
    tail = _Tail(job.folder / STEPS_FILE, on_step)
    told = _Once(job.folder / PREFLIGHT_FILE, lambda found: say_all(launch, found["notes"]))

    def watch() -> None:
        told.read()
        tail.read()

    try:
        if hosts:
            start_on_hosts(job, plan, hosts, launch, watch)
        else:
            start_here(job, plan, launch, watch)
    except KeyboardInterrupt as interrupt:
        if not (job.folder / STEPS_FILE).exists():  # nothing was learned that a person may want
            shutil.rmtree(job.folder, ignore_errors=True)
            raise
        raise _interrupted(interrupt, job) from None
    finally:
        watch()
    return read_result(job.folder)


def _interrupted(interrupt: KeyboardInterrupt, job: Job) -> Interrupted:
    """The interrupt with how far the run came, and from where it can go on."""
    number = interrupt.number if isinstance(interrupt, Interrupted) else signal.SIGINT
    step = json.loads((job.folder / STEPS_FILE).read_text().splitlines()[-1])["step"]
    said = f"interrupted after step {step}; what was done is in {job.folder}"
    written = checkpoints_in(Path(job.checkpoint_folder)) if job.checkpoint_folder else []
    if written:
        said += f"; go on with --resume {written[-1]}"
    return Interrupted(number, said)


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
    plan: Plan,
    steps: int,
    data: Path | None,
    checkpoints: CheckpointOptions,
    launch: Launch,
    folder: Path,
) -> Job:
    return Job(
        kind=TRAIN,
        folder=folder.resolve(),
        plans=((folder / "plan.yaml").resolve(),),
        steps=steps,
        device_type=device_type_of(plan),
        data=str(data.resolve()) if data is not None else "",
        timeout_s=launch.timeout_s,
        preflight=launch.preflight,
        nvtx=launch.nvtx,
        selector=None if launch.selector is None else dict(launch.selector),
        checks_buckets=launch.checks_buckets,
        **checkpoints.job_fields(folder),
    )


def _run_joined(
    plan_path: Path,
    plan: Plan,
    make_job: Callable[[Path], Job],
    runs: Path,
    rank: Rank,
    on_step: OnStep,
    launch: Launch,
) -> RunResult | None:
    check_count(plan, rank)
    store = meet_others(rank, Progress(), launch.timeout_s)
    folder = told_by_rank_0(store, rank, lambda: str(make_run_folder(runs, plan_path).resolve()))
    job = make_job(Path(folder))
    say = launch.say if rank.rank == 0 else (lambda line: None)
    set_environment(plan, rank, job.folder, say)
    with end_together(job.folder, rank.rank) as progress:
        with among_others(store, rank, progress, job.timeout_s):
            if job.preflight:
                preflight(load_plan(job.plans[0]), rank, progress, job.folder, say)
            records = train(job, rank, progress, on_step)
            result = write_run(job.folder, records, rank) if rank.rank == 0 else None
        dist.destroy_process_group()
    if progress.stopped_by:
        raise _interrupted(Interrupted(progress.stopped_by), job)
    return result


class _Once:
    """Reads a JSON file once it is there."""

    def __init__(self, path: Path, on_content: Callable[[Any], None]) -> None:
        self._path, self._on_content, self._is_read = path, on_content, False

    def read(self) -> None:
        if not self._is_read and self._path.exists():
            self._is_read = True
            self._on_content(json.loads(self._path.read_text()))


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
