"""Starts the ranks of a job on this machine and watches over them.

One process a rank, each in its own session so that Ctrl-C reaches the launcher alone, which then
ends all. When a rank dies the others are ended too and one message says which rank it was, at
which step, and its own error.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.job import Job, Note, done_path
from claw_plan.executor.ranks import LAUNCHER_VARIABLE

WORKER = (sys.executable, "-m", "claw_plan.executor.worker")
POLL_S = 0.05
GRACE_S = 5.0
"""Ranks that see a neighbour die get this long to leave their own notes."""


def start_ranks(
    job: Job,
    world_size: int,
    *,
    worker: Sequence[str] = WORKER,
    watch: Callable[[], None] = lambda: None,
) -> None:
    """Runs the job on `world_size` processes of this machine and returns when all are done.

    `watch` is called now and then meanwhile. Raises ExecutionError when a rank fails.
    """
    command = [*worker, str(job.save())]
    # The launcher keeps the store, so no port is chosen before it is bound.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world_size):
            processes.append(_start(command, job.folder, rank, world_size, store.port))
        failed = _wait(processes, job.folder, watch)
        if failed:
            _grant_grace(processes)
            raise ExecutionError(_why(job.folder, processes))
    finally:
        _end(processes)
        for rank in range(world_size):
            done_path(job.folder, rank).unlink(missing_ok=True)


def log_path(folder: Path, rank: int) -> Path:
    """Where all that a rank prints goes."""
    return folder / f"rank{rank}.log"


def _start(
    command: Sequence[str], folder: Path, rank: int, world_size: int, port: int
) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        LAUNCHER_VARIABLE: str(os.getpid()),
        "OMP_NUM_THREADS": "1",
    }
    if any(name == "lo" for _, name in socket.if_nameindex()):
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with log_path(folder, rank).open("wb") as log:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], folder: Path, watch: Callable[[], None]
) -> bool:
    """Until all are done or one has failed; whether one has.

    A rank that has said so is done: gloo's threads may abort a process that closes its groups.
    """
    while True:
        codes = [process.poll() for process in processes]
        codes = [
            0 if code and done_path(folder, rank).exists() else code
            for rank, code in enumerate(codes)
        ]
        watch()
        if any(codes):
            return True
        if all(code == 0 for code in codes):
            return False
        time.sleep(POLL_S)


def _grant_grace(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(POLL_S)


def _why(folder: Path, processes: Sequence[subprocess.Popen[bytes]]) -> str:
    """Which rank failed first, and its own error; a rank that was killed left no note."""
    for rank, process in enumerate(processes):
        code = process.poll()
        if code and Note.read(folder, rank) is None:
            how = f"was killed by {_signal(-code)}" if code < 0 else f"exited with {code}"
            others = [note for r in range(len(processes)) if (note := Note.read(folder, r))]
            step = max((note.step for note in others), default=0)
            when = f"at step {step}" if step else "before the first step"
            return f"rank {rank} {how} {when}; its output is in {log_path(folder, rank)}"
    notes = [note for rank in range(len(processes)) if (note := Note.read(folder, rank))]
    first = min(notes, key=lambda note: (not note.is_ours, note.time_ns))
    if first.is_ours:
        return first.error
    when = f"at step {first.step}" if first.step else "before the first step"
    return (
        f"rank {first.rank} failed {when}: {first.error}; "
        f"its traceback is in {log_path(folder, first.rank)}"
    )


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends those that still run, in order: asked, then forced."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + 1.0
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
