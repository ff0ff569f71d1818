"""This process as one rank: where it stands, which device it has, how it meets the others.

Four starters are understood: our own launcher and torchrun (RANK, WORLD_SIZE, LOCAL_RANK), srun
(SLURM_PROCID, …), Open MPI's mpirun (OMPI_COMM_WORLD_RANK, …) and MPICH's mpiexec (PMI_RANK, …).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.rendezvous import TIMEOUT_S, meet
from claw_plan.executor.slurm import tasks_per_node

STARTERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
    "mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
"""What each starter calls rank, number of ranks, and both of them on the host.

Sources: torch.distributed.run's docstring; srun(1), 'Output environment variables' (SLURM_NTASKS
also stands in a batch script, which is no rank); Open MPI FAQ, 'Running MPI jobs', 32; Hydra's
PMI-1 environment.
"""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A rank's place, in all and on its host, and the kind of device it computes on."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device_type: str = "cpu"

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] = os.environ, device_type: str = "cpu"
    ) -> Rank | None:
        """The rank a starter made of this process; None when it was started by itself."""
        starter = starter_of(environment)
        if starter is None:
            return None
        names = STARTERS[starter]
        rank, world_size = _number(environment, names[0]), _number(environment, names[1])
        local_rank = _number(environment, names[2], rank)
        local_world_size = _number(environment, names[3], world_size)
        if starter == "srun":
            local_world_size = _tasks_here(environment, world_size)
        if not (0 <= rank < world_size and 0 <= local_rank < local_world_size <= world_size):
            raise ExecutionError(
                f"{starter} says that this is rank {rank} of {world_size}, and number "
                f"{local_rank} of {local_world_size} on its host, which cannot be; "
                f"check {', '.join(name for name in names if name in environment)}"
            )
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            device_type=device_type,
        )

    @property
    def device(self) -> torch.device:
        """Its own accelerator, or the CPU."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        if self.local_rank >= torch.cuda.device_count():
            raise ExecutionError(
                f"this host has {torch.cuda.device_count()} GPUs, but rank {self.rank} is number "
                f"{self.local_rank} on it; start at most one rank for each GPU"
            )
        return torch.device("cuda", self.local_rank)

    def hosts(self, ranks: Iterable[int]) -> int:
        """How many hosts these ranks lie on; each host is filled before the next."""
        return len({self.host(rank) for rank in ranks})

    def host(self, rank: int) -> int:
        """The host that a rank lies on, counted from 0."""
        return rank // self.local_world_size


def starter_of(environment: Mapping[str, str] = os.environ) -> str | None:
    """Which of `STARTERS` made this process one of several ranks; None when none did."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return "torchrun"
    for starter in ("srun", "mpirun", "mpiexec"):
        names = STARTERS[starter]
        if names[0] in environment and _number(environment, names[1], 1) > 1:
            return starter
    return None


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdecimal():
        raise ExecutionError(f"{name} must be a whole number; got {text[:40]!r}")
    return int(text)


def _tasks_here(environment: Mapping[str, str], world_size: int) -> int:
    counts = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _number(environment, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else world_size


def join(rank: Rank, store: Store | None = None, timeout_s: float = TIMEOUT_S) -> None:
    """Meets the other ranks: NCCL between GPUs, gloo between CPUs.

    `store` is what `meet` gave; without one the ranks meet here.
    """
    device = rank.device
    if store is None:
        store = meet(rank.rank, rank.world_size, rank.local_world_size, timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("groups", store),
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )


def take_core(rank: Rank) -> None:
    """On a CPU: one thread, pinned to one core, so that ranks do not disturb each other."""
    if rank.device.type != "cpu":
        return
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank.local_rank % len(cores)]})


LAUNCHER_VARIABLE = "CLAW_PLAN_LAUNCHER"
"""Holds the launcher's process id for the ranks it starts."""


def die_with_parent() -> None:
    """Linux: the kernel kills this process when its launcher is gone, however it went."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # from <linux/prctl.h>
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        launcher = os.environ.get(LAUNCHER_VARIABLE)
        if launcher is not None and os.getppid() != int(launcher):
            os._exit(1)  # it went while this process was still importing, so no signal comes
