"""`claw-plan detect` with a machine that is measured at once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from claw_plan.cli.main import cli
from claw_plan.executor import benchmark, detect_cluster, detect_hosts
from claw_plan.executor.detect_cluster import Detected
from claw_plan.profiles.measurement import Measurement
from claw_plan.profiles.profile import load_profile, measurement_of, record_of
from claw_plan.profiles.topology.reading import Host
from claw_plan.profiles.work import OpWork

MACHINE = {"name": "here", "nodes": ({"count": 1, "type": "cpu"},)}
WORK = OpWork(kind="memory", dims=(), dtype="float32", flops=0, bytes=8)
MEASURED = [Measurement(device="cpu-core", work=WORK, samples_ns=(5,), provenance={})]


def call(*args: str) -> Result:
    return CliRunner().invoke(cli, ["detect", *args])


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(
        benchmark, "measure_machine", lambda progress, benchmark: (MACHINE, MEASURED)
    )


def test_the_cluster_file_is_printed_or_written(tmp_path: Path) -> None:
    printed = call()
    assert printed.exit_code == 0
    assert yaml.safe_load(printed.stdout) == {"name": "here", "nodes": [MACHINE["nodes"][0]]}
    assert list(tmp_path.iterdir()) == []
    written = call("-o", "cluster.yaml")
    assert (written.exit_code, written.stdout) == (0, "")
    assert (tmp_path / "cluster.yaml").read_text() == printed.stdout
    profile = load_profile(tmp_path / "cluster.yaml.profile")
    assert profile.measurements[0].samples_ns == (5,)


def test_json_has_the_cluster_and_the_measurements() -> None:
    found = json.loads(call("--json").stdout)
    assert found["cluster"]["name"] == "here"
    assert [measurement_of(record) for record in found["measurements"]] == MEASURED
    assert found["notes"] == []


def test_hosts_of_a_file_are_asked_through_ssh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    answer = {
        "cluster": {"name": "two", "nodes": [{"type": "cpu"}]},
        "notes": ["clock of n2: +0.1 ms"],
        "measurements": [record_of(MEASURED[0])],
    }

    def detect_on(hosts: list[Host], starter: str, arguments: list[str]) -> str:
        asked.append((hosts, starter, arguments))
        return json.dumps(answer)

    monkeypatch.setattr(detect_hosts, "detect_on", detect_on)
    (tmp_path / "hosts").write_text("n1 slots=8\nme@n2 slots=8\n")
    done = call("--hostfile", "hosts", "--benchmark", "-o", "two.yaml")
    assert done.exit_code == 0
    assert "clock of n2: +0.1 ms" in done.stderr
    ((hosts, starter, arguments),) = asked
    assert [host.user for host in hosts] == [None, "me"]
    assert (starter, arguments) == ("ssh", ["--json", "--benchmark"])
    assert yaml.safe_load((tmp_path / "two.yaml").read_text())["name"] == "two"
    assert len(load_profile(tmp_path / "two.yaml.profile").measurements) == 1
    monkeypatch.setattr(detect_hosts, "detect_on", lambda *_: "Last login: today")
    done = call("--hostfile", "hosts")
    assert done.exit_code == 2
    assert "n1 answered 'Last login: today', not a detection" in done.stderr


def test_hosts_of_a_slurm_job_are_asked_through_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def detect_on(hosts: list[Host], starter: str, arguments: list[str]) -> str:
        asked.extend([starter, *(host.name for host in hosts)])
        return json.dumps({"cluster": {"nodes": []}, "notes": [], "measurements": []})

    monkeypatch.setattr(detect_hosts, "detect_on", detect_on)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[07-08]")
    assert call().exit_code == 0
    assert asked == ["srun", "n07", "n08"]


def test_hosts_that_were_started_together_look_together(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    places: list[tuple[int, int]] = []

    def together(place: int, hosts: int, describe: Any) -> Detected | None:
        places.append((place, hosts))
        return None

    monkeypatch.setattr(detect_cluster, "detect_together", together)
    done = call()
    assert (done.exit_code, done.stdout, places) == (0, "", [(1, 2)])
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert call().exit_code == 0
    assert places == [(1, 2)]


def test_a_hostfile_that_is_wrong_stops_before_any_work(tmp_path: Path) -> None:
    done = call("--hostfile", "none")
    assert (done.exit_code, done.stdout) == (2, "")
    (tmp_path / "hosts").write_text("n1 lots=8\n")
    assert "hosts:1: 'lots=8' is not understood" in call("--hostfile", "hosts").stderr
