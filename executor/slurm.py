"""Slurm: what its variables say of ranks, and the batch script that trains with a plan.

`sbatch_text` is `claw-plan run plan.yaml --slurm`: a script whose every line says why it is there.
Source of the options: sbatch(1) and srun(1), https://slurm.schedmd.com/sbatch.html.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from claw_plan.executor.errors import ExecutionError

WARNING_S = 120
"""How long before the time limit Slurm sends SIGUSR1: a step and a checkpoint fit into it."""

_TASKS = re.compile(r"(\d{1,6})(?:\(x(\d{1,6})\))?\Z")


def tasks_per_node(text: str) -> list[int]:
    """SLURM_STEP_TASKS_PER_NODE, as in '4(x2),3', to [4, 4, 3]; empty for anything else."""
    counts: list[int] = []
    for part in text.split(",") if text else []:
        match = _TASKS.match(part)
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def sbatch_text(
    name: str,
    ranks_per_node: Sequence[int],
    command: Sequence[str],
    *,
    gpus: bool,
    cores_per_rank: int = 1,
) -> str:
    """The batch script: one task for each rank, started by srun, on as many nodes as the plan.

    `command` is what every rank runs. Raises ExecutionError for a plan whose hosts have unequally
    many ranks: a batch job's nodes are all alike.
    """
    ranks = ranks_per_node[0]
    if set(ranks_per_node) != {ranks}:
        counts = ", ".join(map(str, ranks_per_node))
        raise ExecutionError(
            f"the plan's hosts have {counts} ranks, but one batch job gives all of its nodes "
            "equally many; use a hostfile, or plan for equal hosts"
        )
    options = [
        (f"--job-name={name}", "what squeue shows"),
        (f"--nodes={len(ranks_per_node)}", "as many hosts as the plan's devices are on"),
        (f"--ntasks-per-node={ranks}", "one process for each device of the plan"),
        (f"--cpus-per-task={cores_per_rank}", "cores of a rank; raise it for data loading"),
        ("--exclusive", "other jobs on the nodes would take the bandwidth the plan counts on"),
        ("--mem=0", "all memory of a node: every rank builds the whole model once on its host"),
        (f"--signal=USR1@{WARNING_S}", f"{WARNING_S} s before the limit all ranks end a step"),
        ("--time=24:00:00", "your queue's limit may be lower"),
        ("--output=%x-%j.out", "what the ranks print: job name and number"),
    ]
    if gpus:
        options.insert(4, (f"--gpus-per-node={ranks}", "one GPU for each rank"))
    lines = ["#!/bin/bash"]
    for option, why in options:
        lines += [f"# {why}:", f"#SBATCH {option}"]
    lines += [
        "",
        "# A rank that fails ends the job step at once; rank 0's host is the first of the job's.",
        f"srun --kill-on-bad-exit=1 {shlex.join(command)}",
        "",
    ]
    return "\n".join(lines)
