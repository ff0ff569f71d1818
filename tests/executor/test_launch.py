"""Ranks that end badly. The workers are small scripts: what they do is in the test."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.job import TRAIN, Job
from claw_plan.executor.launch import start_ranks
from claw_plan.executor.local_ranks import log_path

pytestmark = pytest.mark.slow

PREAMBLE = """
import os, signal, sys, time
from pathlib import Path
from claw_plan.executor.job import Job, end_together
rank = int(os.environ["RANK"])
job = Job.load(Path(sys.argv[1]))
(job.folder / f"pid{rank}").write_text(str(os.getpid()))
"""


def launched(folder: Path, body: str, ranks: int = 2, timeout_s: float = 60.0) -> None:
    script = folder / "worker.py"
    script.write_text(PREAMBLE + body)
    job = Job(
        kind=TRAIN,
        folder=folder,
        plans=(),
        steps=1,
        timeout_s=timeout_s,
        checkpoint_folder=str(folder / "checkpoints"),
    )
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


TOGETHER = """
import torch, torch.distributed as dist
from claw_plan.executor.rank_work import among_others, meet_others
from claw_plan.executor.ranks import Rank
me = Rank.from_environment()
with end_together(job.folder, rank) as progress:
    store = meet_others(me, progress, job.timeout_s)
    with among_others(store, me, progress, job.timeout_s):
        for progress.step in range(1, 10**6):
            dist.all_reduce(torch.ones(8))
            time.sleep(0.05)
            act()
"""
"""Ranks that meet, join and exchange something in every step."""


def test_a_killed_rank_is_named_with_its_signal_and_step(tmp_path: Path) -> None:
    body = """
def act():
    if rank == 2 and progress.step == 20:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    with pytest.raises(ExecutionError, match=r"rank 2 was killed by SIGKILL .* at step (1\d|20);"):
        launched(tmp_path, body + TOGETHER, ranks=3)
    assert alive(tmp_path) == []


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), signal.SIGSTOP)", "stall()"])
def test_a_rank_that_stands_still_is_named_within_the_timeout(tmp_path: Path, how: str) -> None:
    """Stopped by a signal it gives no sign of life; in somebody's loop it still does."""
    body = f"""
def stall():
    while True:
        time.sleep(0.01)

def act():
    if rank == 1 and progress.step == 10:
        {how}
"""
    expected = (
        "ranks? 1 .*(no sign of life|gone or stopped).* at step (9|10)"
        if "STOP" in how
        else r"rank 1 is stuck in worker.py:\d+ \(stall\) at step 10"
    )
    started = time.monotonic()
    with pytest.raises(ExecutionError, match=expected):
        launched(tmp_path, body + TOGETHER, ranks=3, timeout_s=6.0)
    print("ended after", time.monotonic() - started)
    assert alive(tmp_path) == []


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    body = """
if rank == 1:
    time.sleep(600)
"""
    with pytest.raises(ExecutionError, match="rank 1 of 3 did not come within 5 s; look whether"):
        launched(tmp_path, body + TOGETHER, ranks=3, timeout_s=5.0)
    assert alive(tmp_path) == []


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


def test_what_a_killed_rank_had_half_written_is_removed(tmp_path: Path) -> None:
    body = """
if rank == 0:
    (job.folder / ".rank0.error.json.1.tmp").touch()
    for name in ("step-00000003", ".step-00000006.12.partial"):
        (Path(job.checkpoint_folder) / name).mkdir(parents=True)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
    with pytest.raises(ExecutionError, match=r"rank 0 was killed by SIGKILL"):
        launched(tmp_path, body)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    assert not list(tmp_path.glob(".*.tmp"))
