"""Ranks that end badly. The workers are small scripts: what they do is in the test."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.job import TRAIN, Job
from claw_plan.executor.launch import log_path, start_ranks

pytestmark = pytest.mark.slow

PREAMBLE = """
import os, signal, sys, time
from pathlib import Path
from claw_plan.executor.job import Job, end_together
rank = int(os.environ["RANK"])
job = Job.load(Path(sys.argv[1]))
(job.folder / f"pid{rank}").write_text(str(os.getpid()))
"""


def launched(folder: Path, body: str, ranks: int = 2) -> None:
    script = folder / "worker.py"
    script.write_text(PREAMBLE + body)
    job = Job(kind=TRAIN, folder=folder, plans=(), steps=1)
    start_ranks(job, ranks, worker=(sys.executable, str(script)))


def alive(folder: Path) -> list[int]:
    found = []
    for path in folder.glob("pid*"):
        try:
            os.kill(int(path.read_text()), 0)
        except ProcessLookupError:
            continue
        found.append(int(path.read_text()))
    return found


def test_ranks_know_their_place_and_their_output_is_kept(tmp_path: Path) -> None:
    launched(tmp_path, "print(rank, os.environ['WORLD_SIZE'], os.environ['OMP_NUM_THREADS'])")
    assert log_path(tmp_path, 1).read_text().split() == ["1", "2", "1"]


def test_the_first_error_is_told_and_the_others_are_ended(tmp_path: Path) -> None:
    body = """
with end_together(job.folder, rank) as progress:
    progress.step = 4
    if rank == 1:
        raise ValueError("no such weight")
    time.sleep(1)
    raise RuntimeError("connection closed by peer")
"""
    with pytest.raises(ExecutionError, match=r"rank 1 failed at step 4: ValueError: no such w"):
        launched(tmp_path, body)
    assert "no such weight" in log_path(tmp_path, 1).read_text()
    assert alive(tmp_path) == []


def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path) -> None:
    body = """
with end_together(job.folder, rank) as progress:
    progress.step = 2
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    raise RuntimeError("connection closed by peer")
"""
    with pytest.raises(ExecutionError, match="rank 0 was killed by SIGKILL at step 2"):
        launched(tmp_path, body)


def test_an_error_for_the_user_is_told_as_it_is(tmp_path: Path) -> None:
    body = """
from claw_plan.executor.errors import ExecutionError
with end_together(job.folder, rank):
    raise ExecutionError("use a larger vocabulary")
"""
    with pytest.raises(ExecutionError, match=r"^use a larger vocabulary$"):
        launched(tmp_path, body)


def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(PREAMBLE + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)")
    job = Job(kind=TRAIN, folder=tmp_path, plans=(), steps=1)

    def interrupt() -> None:
        if len(list(tmp_path.glob("pid*"))) == 2:
            time.sleep(0.3)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start_ranks(job, 2, worker=(sys.executable, str(script)), watch=interrupt)
    assert alive(tmp_path) == []


def test_a_rank_that_had_done_its_work_may_end_badly(tmp_path: Path) -> None:
    """As gloo's threads may have it when groups are closed."""
    body = """
from claw_plan.executor.job import leave_done
leave_done(job.folder, rank)
if rank == 1:
    os.abort()
"""
    launched(tmp_path, body)
    assert not list(tmp_path.glob("*.done"))
