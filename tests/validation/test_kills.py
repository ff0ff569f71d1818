"""A few of the kills of bench/kill.py: ended in time and named, and nothing is lost afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "kill.py"


@pytest.mark.slow
def test_killed_runs_end_and_go_on_as_if_undisturbed() -> None:
    """dead-rank: one kill in the middle of a step, one while a checkpoint is written."""
    command = [sys.executable, str(BENCH), "--kills=2", "--plans=two fsdp", "--seed=303"]
    done = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=900,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 kills as promised" in done.stdout
    assert "2 trainings of 2 had a checkpoint and went on: 2 equal the undisturbed" in done.stdout
