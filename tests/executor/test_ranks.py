from __future__ import annotations

import os
import subprocess
import sys

import pytest

from claw_plan.executor.ranks import LAUNCHER_VARIABLE, Rank


def test_torchrun_says_where_a_rank_stands() -> None:
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    rank = Rank(rank=5, world_size=8, local_rank=1, local_world_size=4)
    assert Rank.from_environment(environment) == rank


def test_srun_says_it_in_its_own_words() -> None:
    environment = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}
    rank = Rank(rank=3, world_size=4, local_rank=1, local_world_size=4)
    assert Rank.from_environment(environment) == rank


@pytest.mark.parametrize("environment", [{}, {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}])
def test_a_process_by_itself_is_no_rank(environment: dict[str, str]) -> None:
    assert Rank.from_environment(environment) is None


@pytest.mark.parametrize("launcher, code", [(None, 0), ("here", 0), ("gone", 1)])
@pytest.mark.slow
def test_a_rank_whose_launcher_went_before_it_was_ready_ends(
    launcher: str | None, code: int
) -> None:
    program = "import sys; from claw_plan.executor.ranks import die_with_parent; die_with_parent()"
    environment = dict(os.environ)
    if launcher is not None:
        environment[LAUNCHER_VARIABLE] = str(os.getpid() if launcher == "here" else 2**22 + 1)
    done = subprocess.run([sys.executable, "-c", program], env=environment, timeout=60)
    assert done.returncode == code
