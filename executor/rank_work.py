"""What every rank does around its work: meet the others, show that it lives, join them, leave.

Used by `worker` for ranks that our launcher started, and by `run` for those of torchrun, srun and
mpirun.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.heartbeat import STOPPED, beating, end_process
from claw_plan.executor.job import Progress
from claw_plan.executor.nccl_environment import (
    apply,
    choose,
    interface_towards,
    loopback,
    mistakes,
    write_environment,
)
from claw_plan.executor.ranks import Rank, join, take_core
from claw_plan.executor.rendezvous import master_address, meet
from claw_plan.planner.plan import Plan
from claw_plan.profiles.cluster_file import cluster_from_mapping
from claw_plan.profiles.errors import ClawPlanError

_TOLD = "told"


def meet_others(rank: Rank, progress: Progress, timeout_s: float) -> Store:
    """The store, once all ranks have come."""
    take_core(rank)
    progress.phase = "waiting for the other ranks"
    return meet(rank.rank, rank.world_size, rank.local_world_size, timeout_s)


@contextmanager
def among_others(store: Store, rank: Rank, progress: Progress, timeout_s: float) -> Iterator[None]:
    """The process groups are there meanwhile, and a rank that is gone ends all the others."""
    with beating(store, rank.rank, rank.world_size, progress, timeout_s, end_process):
        progress.phase = "joining the others"
        join(rank, store, timeout_s)
        progress.phase = "building the model"
        yield
        progress.phase = "ending"
        dist.barrier()
        if progress.stopped_by and rank.rank == 0:
            store.set(STOPPED, str(progress.stopped_by))


def told_by_rank_0(store: Store, rank: Rank, find: Callable[[], str]) -> str:
    """What `find` answers on rank 0, on all ranks; its error for the user is everybody's."""
    if rank.rank == 0:
        try:
            answer = {"value": find()}
        except ClawPlanError as error:
            answer = {"error": str(error)}
        store.set(_TOLD, json.dumps(answer))
    answer = json.loads(store.get(_TOLD))
    if "error" in answer:
        raise ExecutionError(answer["error"])
    return str(answer["value"])


def set_environment(plan: Plan, rank: Rank, folder: Path, say: Callable[[str], None]) -> None:
    """Chooses the variables of NCCL and gloo for this rank's host and makes them its own."""
    hosts = -(-rank.world_size // rank.local_world_size)
    host, _ = master_address(os.environ, rank.world_size, rank.local_world_size)
    settings = choose(
        cluster_from_mapping(plan.cluster, "cluster"),
        hosts=hosts,
        interface=loopback() if hosts == 1 else interface_towards(host),
        folder=folder,
    )
    if rank.rank == 0:
        write_environment(folder, settings)
        for line in [*map(str, settings), *mistakes()]:
            say(line)
    apply(settings)
