"""Requests to stop, of one process and of several that are asked at different moments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from claw_plan.executor.ranks import Rank
from claw_plan.executor.stopping import STOP_SIGNALS, StopRequest


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_stops_at_the_end_of_a_step_and_handlers_come_back(number: int) -> None:
    before = signal.getsignal(number)
    stop = StopRequest()
    with stop.listen():
        stop.begin_step()
        assert stop.agreed() == 0
        os.kill(os.getpid(), number)
        stop.begin_step()
        assert stop.agreed() == number
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_ends_at_once() -> None:
    # A shell that starts a program in the background lets it ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    stop = StopRequest()
    with pytest.raises(KeyboardInterrupt), stop.listen():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_a_warning_may_be_followed_by_the_signal_itself() -> None:
    stop = StopRequest()
    with stop.listen():
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed() == signal.SIGUSR1


def test_a_step_in_flight_is_not_told_of_what_came_later(alone: Rank) -> None:
    stop = StopRequest()
    stop.begin_step()
    stop.ask(signal.SIGINT)
    assert stop.agreed() == 0
    stop.begin_step()
    assert stop.agreed() == signal.SIGINT


@pytest.mark.slow
def test_ranks_end_after_the_same_step_whoever_is_asked(tmp_path: Path) -> None:
    """Rank 1 signals itself in step 3; all end after step 4, which began after it."""
    script = tmp_path / "ranks.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal, sys
        from pathlib import Path
        import torch.distributed as dist
        from claw_plan.executor.stopping import StopRequest
        dist.init_process_group("gloo")
        rank, stop = dist.get_rank(), StopRequest()
        with stop.listen():
            for step in range(1, 9):
                stop.begin_step()
                if rank == 1 and step == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
                if reason := stop.agreed():
                    Path(sys.argv[1], f"rank{rank}").write_text(f"{step} {reason}")
                    break
        dist.barrier()
        """)
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=3", str(script), str(tmp_path)]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    assert [(tmp_path / f"rank{r}").read_text() for r in range(3)] == ["4 15"] * 3
