from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.host_agent import exit_key, main


def test_a_host_without_the_shared_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(ExecutionError, match="must be on a file system that all hosts share"):
        main([str(tmp_path / "job.json"), "0", "1", "2", "127.0.0.1"])


def test_exit_codes_have_a_key_for_each_rank() -> None:
    assert exit_key(3) != exit_key(30)


@pytest.mark.slow
def test_an_error_is_one_line_on_the_launchers_side(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "claw_plan.executor.host_agent"]
    done = subprocess.run(
        [*command, str(tmp_path / "job.json"), "0", "1", "2", "127.0.0.1"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 2 and done.stderr.decode().strip().count("\n") == 0
