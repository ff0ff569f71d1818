"""Two 'hosts' on this machine, behind an ssh that runs its command here."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.launch import Launch
from claw_plan.executor.launch_hosts import HostRanks, hosts_for, passed_on
from claw_plan.executor.run import run_plan
from claw_plan.planner.plan import Plan, load_plan, save_plan
from claw_plan.profiles.errors import InputError
from claw_plan.profiles.topology.reading import Host

SSH = """#!/bin/sh
for command; do :; done
case "$*" in *unreachable*) echo "ssh: connect to host: No route to host" >&2; exit 255;; esac
exec sh -c "$command"
"""


@pytest.fixture
def two_hosts(tiny_plan: Callable[..., Path], tmp_path: Path) -> Path:
    """A plan of two ranks on each of two hosts."""
    plan = load_plan(tiny_plan("hosts", dp_shard=4))
    cluster = {"name": "two", "nodes": [{"count": 2, "devices": {"type": "cpu", "count": 2}}]}
    mesh = plan.mesh.model_copy(update={"devices": ["0:0", "0:1", "1:0", "1:1"]})
    save_plan(plan.model_copy(update={"mesh": mesh, "cluster": cluster}), tmp_path / "plan.yaml")
    return tmp_path / "plan.yaml"


@pytest.fixture
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(SSH)
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def hostfile(folder: Path, text: str) -> Path:
    path = folder / "hosts"
    path.write_text(text)
    return path


def test_ranks_are_placed_host_by_host(two_hosts: Path, tmp_path: Path) -> None:
    plan = load_plan(two_hosts)
    file = hostfile(tmp_path, "n1 slots=2\nn2 slots=4\nn3 slots=4\n")
    assert hosts_for(plan, file) == [
        HostRanks(host=Host(name="n1", gpus=2), first_rank=0, count=2),
        HostRanks(host=Host(name="n2", gpus=4), first_rank=2, count=2),
    ]


def test_hosts_that_do_not_fit_are_one_line(two_hosts: Path, tmp_path: Path) -> None:
    plan = load_plan(two_hosts)
    with pytest.raises(ExecutionError, match="trains on 2 hosts, but hosts has 1; give as many"):
        hosts_for(plan, hostfile(tmp_path, "n1 slots=4\n"))
    with pytest.raises(ExecutionError, match="puts 2 ranks on n2, but hosts gives it 1 slots"):
        hosts_for(plan, hostfile(tmp_path, "n1 slots=4\nn2 slots=1\n"))
    with pytest.raises(InputError, match="there is no file"):
        hosts_for(plan, tmp_path / "none")


def test_a_job_of_several_nodes_is_used_and_ranks_of_srun_are_not_started_twice(
    two_hosts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan: Plan = load_plan(two_hosts)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    assert [placed.host.name for placed in hosts_for(plan, None)] == ["n1", "n2"]
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert hosts_for(plan, None) == []


def test_nothing_secret_is_passed_on() -> None:
    environment = {"NCCL_ALGO": "Ring", "HF_TOKEN": "t", "NCCL_API_KEY": "k", "HOME": "/root"}
    assert passed_on(environment) == {"NCCL_ALGO": "Ring"}


@pytest.mark.slow
@pytest.mark.usefixtures("fake_ssh")
def test_two_hosts_train_as_one_machine_does(two_hosts: Path, tmp_path: Path) -> None:
    said: list[str] = []
    file = hostfile(tmp_path, "127.0.0.1 slots=2\nlocalhost slots=2\n")
    launch = Launch(hostfile=file, say=said.append)
    result = run_plan(two_hosts, 3, runs=tmp_path / "runs", launch=launch)
    alone = run_plan(two_hosts, 3, runs=tmp_path / "runs", launch=Launch(preflight=False))
    assert result is not None and alone is not None
    assert result.losses == alone.losses
    assert "localhost: ranks 2 to 3" in said
    found = json.loads((Path(result.run) / "preflight.json").read_text())
    pairs = {(link["source"], link["target"]) for link in found["links"]}
    assert pairs == {("127.0.0.1", "localhost"), ("localhost", "127.0.0.1")}
    assert all(link["bytes_per_s"] > 0 for link in found["links"])
    assert not [note for note in found["notes"] if "predictions" in note]


@pytest.mark.slow
@pytest.mark.usefixtures("fake_ssh")
def test_a_host_that_cannot_be_reached_is_named(two_hosts: Path, tmp_path: Path) -> None:
    file = hostfile(tmp_path, "127.0.0.1 slots=2\nunreachable@localhost slots=2\n")
    with pytest.raises(
        ExecutionError, match=r"localhost are gone \(exit code 255\): ssh: connect"
    ):
        run_plan(two_hosts, 3, runs=tmp_path / "runs", launch=Launch(hostfile=file))


@pytest.mark.slow
@pytest.mark.usefixtures("fake_ssh")
def test_a_rank_killed_on_another_host_ends_all(two_hosts: Path, tmp_path: Path) -> None:
    file = hostfile(tmp_path, "127.0.0.1 slots=2\nlocalhost slots=2\n")

    def kill_rank_3() -> None:
        pattern = "runs/*/rank3.jsonl"
        # The second one: word of the first may still be on its way when it is written.
        while not any(p.read_text().count('"event": "step"') > 1 for p in tmp_path.glob(pattern)):
            time.sleep(0.05)
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if b"RANK=3\0" in (process / "environ").read_bytes().replace(b"LOCAL_", b"_"):
                    if str(tmp_path).encode() in (process / "cmdline").read_bytes():
                        os.kill(int(process.name), 9)
            except OSError:
                continue

    killer = threading.Thread(target=kill_rank_3, daemon=True)
    killer.start()
    with pytest.raises(ExecutionError, match=r"rank 3 was killed by SIGKILL .* at step"):
        run_plan(two_hosts, 10**5, runs=tmp_path / "runs", launch=Launch(hostfile=file))
    patience = time.monotonic() + 10.0  # the other host's agent ends its ranks by itself
    while (running := processes_of(tmp_path)) and time.monotonic() < patience:
        time.sleep(0.05)
    assert running == []


def processes_of(folder: Path) -> list[str]:
    """The command lines of processes that name the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found.append(path.read_text())
    return [line for line in found if str(folder) in line]
