from __future__ import annotations

import os
from pathlib import Path

import pytest

from claw_plan.executor import detect_hosts
from claw_plan.executor.detect_hosts import detect_on, srun, ssh
from claw_plan.executor.errors import ExecutionError
from claw_plan.profiles.topology.reading import Host

HOSTS = [Host(name="n1", user="me"), Host(name="n2")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where programs are looked for first; `claw-plan` prints what it was started with."""
    program = tmp_path / "claw-plan"
    program.write_text(
        '#!/bin/sh\necho "$CLAW_PLAN_HOST $RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR $*"\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(detect_hosts.sys, "argv", [str(program)])
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def fake(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_commands() -> None:
    assert ssh(HOSTS[0], ["a", "b c"]) == ["ssh", "-o", "BatchMode=yes", "me@n1", "a 'b c'"]
    assert srun(HOSTS[1], ["a"])[:2] == ["srun", "--nodelist=n2"]


def test_ssh_starts_one_process_a_host(folder: Path) -> None:
    fake(folder, "ssh", f'echo "$3" >> {folder}/asked; exec sh -c "$4"')
    text = detect_on(HOSTS, "ssh", ["--json"])
    assert text == "n1 0 2 0 n1 detect --json\n"
    assert sorted((folder / "asked").read_text().split()) == ["me@n1", "n2"]


def test_srun_starts_one_process_a_host(folder: Path) -> None:
    fake(folder, "srun", 'shift 4; exec "$@"')
    assert detect_on(HOSTS, "srun", []).startswith("n1 0 2 0 n1 detect")


def test_a_host_that_cannot_be_reached_is_named(folder: Path) -> None:
    fake(
        folder, "ssh", '[ "$3" = n2 ] && { echo "ssh: no route to host" >&2; exit 255; }; sleep 9'
    )
    with pytest.raises(ExecutionError, match=r"on n2 failed \(exit code 255\): ssh: no route to"):
        detect_on(HOSTS, "ssh", [])


def test_without_ssh_the_program_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(ExecutionError, match="cannot start ssh for n1"):
        detect_on(HOSTS, "ssh", [])
