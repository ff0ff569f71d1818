from __future__ import annotations

import pytest

from claw_plan.profiles.topology.nccl_log import read, recognise
from claw_plan.profiles.topology.reading import Host, Reading
from claw_plan.profiles.topology.source import Source


def line(host: str, device: int, text: str, level: str = "INFO") -> str:
    return f"{host}:100{device}:200{device} [{device}] NCCL {level} {text}\n"


START = "NCCL version 2.21.5+cuda12.4\n" + "".join(
    line(host, device, f"comm 0x7f rank {rank} nranks 4 cudaDev {device} busId {bus} - Init")
    for rank, (host, device, bus) in enumerate(
        [("a", 0, "1a000"), ("a", 1, "ce000"), ("b", 0, "1a000"), ("b", 1, "ce000")]
    )
)
TABLE = line(
    "a", 0, "GPU/1A000 :GPU/0-1a000 (0/5000.0/LOC) GPU/0-ce000 (5/10.0/SYS) NET/0 (3/24.0/PHB)"
) + line("a", 0, "GPU/CE000 :GPU/0-1a000 (5/10.0/SYS) GPU/0-ce000 (0/5000.0/LOC) NET/0 (5/10/SYS)")


def only(text: str) -> Reading:
    source = Source("t", text)
    assert recognise(source)
    (reading,) = read(source)
    return reading


@pytest.mark.parametrize("prefix", ["", "[1,3]<stderr>:", "2024-05-01 12:00:00 worker-0 | "])
def test_hosts_and_devices(prefix: str) -> None:
    reading = only("".join(prefix + text + "\n" for text in START.splitlines()))
    assert reading.hosts == (Host(name="a", gpus=2), Host(name="b", gpus=2))
    assert reading.gpu_count == 2
    assert reading.pairs == {}
    assert "NCCL 2.21.5+cuda12.4" in reading.facts
    assert any("NCCL_DEBUG_SUBSYS" in text for text in reading.unknown)


def test_path_tables_give_kinds_of_pairs_and_nics() -> None:
    reading = only(START + line("a", 0, "NET/IB : Using [0]mlx5_0:1/RoCE ; OOB eth0:1<0>") + TABLE)
    assert reading.pairs == {"SYS": ((0, 1),)}
    assert reading.nvlink == "absent"
    assert reading.nics["NET/0"].to_gpus == ("PHB", "SYS")
    assert reading.nics["NET/0"].device == "mlx5_0"


def test_nvlink_in_a_table() -> None:
    reading = only(START + TABLE.replace("SYS", "NVL"))
    assert reading.pairs == {"NVL": ((0, 1),)}
    assert reading.nvlink == "present"


def test_transports_are_no_paths() -> None:
    via = line("a", 0, "Channel 00 : 0[1a000] -> 1[ce000] via P2P/IPC")
    reading = only(START + via + line("a", 1, "Channel 01/0 : 1[1] -> 2[0] [send] via NET/IB/0"))
    assert reading.pairs == {}
    assert {"1 connections by P2P", "1 connections by NET"} <= set(reading.facts)


def test_suspicious_lines_are_told() -> None:
    text = START + line("a", 0, "Using network Socket")
    text += line("a", 0, "Channel 00 : 0[0] -> 1[1] via SHM/direct/direct")
    text += line("b", 1, "misc/ibvwrap.cc:63 Failed to open libibverbs.so[.1]", "WARN")
    warnings = " ".join(only(text).warnings)
    assert "TCP sockets" in warnings
    assert "(SHM): peer-to-peer is off" in warnings
    assert "t:8: NCCL warns: misc/ibvwrap.cc" in warnings


def test_unequal_hosts() -> None:
    reading = only(START + line("c", 0, "Using network IB"))
    assert reading.gpu_count is None
    assert "unequal numbers of GPUs: a 2, b 2, c 1" in reading.warnings[0]
