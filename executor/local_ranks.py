"""The ranks that one host runs: a process each, started, watched and ended.

Each process is in its own session, so that Ctrl-C reaches whoever started them alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from claw_plan.executor.job import done_path
from claw_plan.executor.ranks import LAUNCHER_VARIABLE

WORKER = (sys.executable, "-m", "claw_plan.executor.worker")


class LocalRanks:
    """Ranks `first_rank`, `first_rank + 1`, … of `world_size`, `count` of them.

    `command` is what each runs, `environment` what all see besides this process's own.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        world_size: int,
        *,
        first_rank: int = 0,
        count: int | None = None,
        environment: Mapping[str, str],
    ) -> None:
        self.ranks = range(first_rank, first_rank + (world_size if count is None else count))
        self._command, self._folder, self._world_size = command, folder, world_size
        self._environment = environment
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Starts them all; what each prints goes to its log."""
        for rank in self.ranks:
            own = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank - self.ranks.start),
                "WORLD_SIZE": str(self._world_size),
                "LOCAL_WORLD_SIZE": str(len(self.ranks)),
                LAUNCHER_VARIABLE: str(os.getpid()),
            }
            with log_path(self._folder, rank).open("ab") as log:
                self._processes[rank] = subprocess.Popen(
                    self._command,
                    env=os.environ | self._environment | own,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

    def codes(self) -> dict[int, int | None]:
        """Exit code of each rank, None while it runs.

        A rank that has said so is done: gloo's threads may abort a process that closes its
        groups.
        """
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        return {
            rank: 0 if code and done_path(self._folder, rank).exists() else code
            for rank, code in codes.items()
        }

    def signal(self, number: int) -> None:
        """Sends a signal to all that run."""
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(number)

    def end(self, grace_s: float = 0.0) -> None:
        """Ends those that still run after so long: files are written atomically, so at once."""
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and None in self.codes().values():
            time.sleep(0.02)
        self.signal(signal.SIGKILL)
        for rank, process in self._processes.items():
            process.wait()
            done_path(self._folder, rank).unlink(missing_ok=True)


def log_path(folder: Path, rank: int) -> Path:
    """Where all that a rank prints goes."""
    return folder / f"rank{rank}.log"
