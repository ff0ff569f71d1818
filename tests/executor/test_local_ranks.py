from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from claw_plan.executor.job import leave_done
from claw_plan.executor.local_ranks import LocalRanks, log_path

pytestmark = pytest.mark.slow


def finished(ranks: LocalRanks) -> dict[int, int | None]:
    deadline = time.monotonic() + 60
    while None in ranks.codes().values() and time.monotonic() < deadline:
        time.sleep(0.02)
    return ranks.codes()


def test_ranks_of_the_second_host_know_their_place(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR"]
    ranks = LocalRanks(
        command, tmp_path, 6, first_rank=4, count=2, environment={"MASTER_ADDR": "n1"}
    )
    ranks.start()
    assert finished(ranks) == {4: 0, 5: 0}
    assert log_path(tmp_path, 5).read_text() == "5 1 6 2 n1\n"


def test_ranks_are_signalled_and_ended(tmp_path: Path) -> None:
    ranks = LocalRanks(["sleep", "600"], tmp_path, 2, environment={})
    ranks.start()
    assert ranks.codes() == {0: None, 1: None}
    ranks.signal(signal.SIGTERM)
    assert finished(ranks) == {0: -15, 1: -15}
    leave_done(tmp_path, 1)
    assert ranks.codes() == {0: -15, 1: 0}  # done, however it ended
    ranks.end()
    assert not list(tmp_path.glob("*.done"))


def test_what_does_not_end_is_killed(tmp_path: Path) -> None:
    ranks = LocalRanks(["sh", "-c", "trap '' TERM; sleep 600"], tmp_path, 1, environment={})
    ranks.start()
    ranks.end()
    assert ranks.codes() == {0: -9}
