"""The variables chosen from clusters, beside what torch and the system say of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from claw_plan.executor.nccl_environment import (
    ALLOWED,
    Setting,
    apply,
    choose,
    interface_towards,
    local_environment,
    mistakes,
    own_address_towards,
    read_environment,
    shared_settings,
    write_environment,
)
from claw_plan.profiles.cluster_file import load_cluster


def chosen(cluster: str, hosts: int, **environment: str) -> dict[str, Setting]:
    settings = choose(
        load_cluster(cluster),
        hosts=hosts,
        interface="eth1",
        folder=Path("/runs/1"),
        environment=environment,
    )
    assert all(setting.name in ALLOWED and setting.reason for setting in settings)
    return {setting.name: setting for setting in settings}


def test_each_kind_of_cluster_gets_what_it_needs() -> None:
    assert set(chosen("cpu", 1)) == {"OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"}
    infiniband = chosen("2xdgx-h100", 2)
    assert infiniband["NCCL_SOCKET_IFNAME"].value == "eth1"
    assert infiniband["TORCH_FR_DUMP_TEMP_FILE"].value == "/runs/1/collectives_"
    assert "FI_PROVIDER" not in infiniband and "NCCL_P2P_DISABLE" not in infiniband
    assert chosen("2xp4d.24xlarge", 2)["FI_PROVIDER"].value == "efa"
    assert "NCCL_SOCKET_IFNAME" not in chosen("2xdgx-h100", 1)


def test_what_the_user_has_set_stays_and_is_said() -> None:
    setting = chosen("2xdgx-h100", 2, NCCL_SOCKET_IFNAME="ib0")["NCCL_SOCKET_IFNAME"]
    assert (setting.value, setting.set_by) == ("ib0", "the user")
    assert "the plan would have eth1" in str(setting)
    assert local_environment({"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4"


def test_torch_reads_the_names() -> None:
    """Compiled in, or in the headers that come along with a build without CUDA."""
    folder = Path(torch.__file__).parent
    library = (folder / "lib" / "libtorch_cpu.so").read_bytes()
    headers = (folder / "include/torch/csrc/distributed/c10d").glob("*.hpp")
    text = library + b"".join(header.read_bytes() for header in headers)
    for name in ALLOWED:
        if name.startswith("TORCH_"):
            assert name.encode() in text, name


def test_names_that_articles_made_up_are_told() -> None:
    told = mistakes({"NCCL_RING_ALGO": "1", "NCCL_BUFFSIZE": "2MB", "NCCL_ALGO": "Ring"})
    assert told == [
        "NCCL_RING_ALGO does not exist; NCCL_ALGO=Ring does",
        "NCCL_BUFFSIZE must be a plain number; got '2MB'",
    ]
    assert mistakes({}) == []


def test_settings_of_a_host_need_not_be_equal() -> None:
    environment = {"NCCL_ALGO": "Ring", "NCCL_SOCKET_IFNAME": "eth0", "HOME": "/root"}
    assert shared_settings(environment) == {"NCCL_ALGO": "Ring"}


def test_settings_are_kept_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = list(chosen("cpu", 1).values())
    write_environment(tmp_path, settings)
    assert read_environment(tmp_path) == settings
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "before")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    apply(settings)
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["OMP_NUM_THREADS"]) == ("eth1", "1")


def test_the_way_to_this_machine_is_its_loopback() -> None:
    assert own_address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("no-such-host.invalid") is None
