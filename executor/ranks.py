"""This process as one rank: where it stands, which device it has, how it meets the others.

Three starters are understood: our own launcher and torchrun (RANK, WORLD_SIZE, LOCAL_RANK), and
srun (SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from claw_plan.executor.errors import ExecutionError

TIMEOUT = timedelta(minutes=30)
"""Ranks wait for each other this long: the first step builds and cuts large models."""

DEFAULT_PORT = 29500
"""torchrun's own default."""


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
        if "RANK" in environment and "WORLD_SIZE" in environment:
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        elif "SLURM_PROCID" in environment and int(environment.get("SLURM_NTASKS", "1")) > 1:
            names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
        else:
            return None
        rank, world_size = int(environment[names[0]]), int(environment[names[1]])
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=int(environment.get(names[2], rank)),
            local_world_size=int(environment.get(names[3], world_size)),
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


def join(rank: Rank) -> None:
    """Meets the other ranks: NCCL between GPUs, gloo between CPUs."""
    environment = os.environ
    device = rank.device
    if "MASTER_ADDR" not in environment:
        environment["MASTER_ADDR"] = environment.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    environment.setdefault("MASTER_PORT", str(DEFAULT_PORT))
    environment["RANK"], environment["WORLD_SIZE"] = str(rank.rank), str(rank.world_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        timeout=TIMEOUT,
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
