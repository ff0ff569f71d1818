"""Starts `claw-plan detect` on other hosts, by ssh or srun, and takes the first one's answer.

The hosts then describe themselves and measure the network together (`detect_cluster`). A host
that cannot be reached ends all, by name: nothing goes on with fewer machines.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from claw_plan.executor.detect_cluster import HOST_VARIABLE
from claw_plan.executor.errors import ExecutionError
from claw_plan.profiles.topology.reading import Host

PORT = 29511
_TIMEOUT_S = 900.0
_POLL_S = 0.2
_LAUNCH_VARIABLES = ("LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1")


def ssh(host: Host, command: Sequence[str]) -> list[str]:
    """The command on a host through ssh, without asking for a password."""
    target = f"{host.user}@{host.name}" if host.user else host.name
    return ["ssh", "-o", "BatchMode=yes", target, shlex.join(command)]


def srun(host: Host, command: Sequence[str]) -> list[str]:
    """The command on a host of this Slurm allocation."""
    return ["srun", f"--nodelist={host.name}", "--nodes=1", "--ntasks=1", "--overlap", *command]


def program() -> list[str]:
    """How the hosts start this program: the same path as here, as on a shared file system."""
    here = Path(sys.argv[0])
    if here.name == "claw-plan" and here.exists():
        return [str(here.resolve())]
    return [sys.executable, "-c", "from claw_plan.cli.main import main; main()"]


def detect_on(
    hosts: Sequence[Host], starter: str, arguments: Sequence[str], port: int = PORT
) -> str:
    """What `claw-plan detect ARGUMENTS` prints on the first host, all taking part.

    `starter` is 'ssh' or 'srun'. Raises ExecutionError that names the host which failed.
    """
    make = ssh if starter == "ssh" else srun
    with tempfile.TemporaryDirectory(prefix="claw-plan-") as folder:
        files = [
            (Path(folder) / f"{place}.out", Path(folder) / f"{place}.err")
            for place in range(len(hosts))
        ]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for place, host in enumerate(hosts):
                command = [*_environment(hosts, place, port), *program(), "detect", *arguments]
                processes.append(_start(make(host, command), files[place], host))
            _wait(hosts, processes, [error for _, error in files])
        finally:
            for process in processes:
                if process.poll() is None:
                    process.terminate()
        return files[0][0].read_text(encoding="utf-8")


def _environment(hosts: Sequence[Host], place: int, port: int) -> list[str]:
    return [
        "env",
        f"RANK={place}",
        f"WORLD_SIZE={len(hosts)}",
        *_LAUNCH_VARIABLES,
        f"MASTER_ADDR={hosts[0].name.strip('[]')}",
        f"MASTER_PORT={port}",
        f"{HOST_VARIABLE}={hosts[place].name}",
    ]


def _start(
    command: Sequence[str], files: tuple[Path, Path], host: Host
) -> subprocess.Popen[bytes]:
    output: IO[bytes]
    errors: IO[bytes]
    with files[0].open("wb") as output, files[1].open("wb") as errors:
        try:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors
            )
        except OSError as error:
            raise ExecutionError(
                f"cannot start {command[0]} for {host.name}: {error.strerror}; is it installed?"
            ) from None


def _wait(
    hosts: Sequence[Host], processes: Sequence[subprocess.Popen[bytes]], errors: Sequence[Path]
) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while any(process.poll() is None for process in processes):
        _refuse_failed(hosts, processes, errors)
        if time.monotonic() > deadline:
            silent = [h.name for h, p in zip(hosts, processes, strict=True) if p.poll() is None]
            raise ExecutionError(
                f"{', '.join(silent[:4])} did not finish within {_TIMEOUT_S / 60:.0f} minutes"
            )
        time.sleep(_POLL_S)
    _refuse_failed(hosts, processes, errors)


def _refuse_failed(
    hosts: Sequence[Host], processes: Sequence[subprocess.Popen[bytes]], errors: Sequence[Path]
) -> None:
    for host, process, error in zip(hosts, processes, errors, strict=True):
        if process.poll():
            lines = error.read_text(encoding="utf-8", errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
            raise ExecutionError(
                f"detection on {host.name} failed (exit code {process.returncode}): "
                f"{last.strip()[:200]}"
            )
