from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from claw_plan.executor.clock_offset import ClockOffset
from claw_plan.executor.detect_cluster import joined, node_place
from claw_plan.executor.ranks import Rank
from claw_plan.profiles.cluster_file import cluster_from_mapping
from claw_plan.profiles.work import CollectiveWork


def node(speed: float = 50.0, cores: int = 4) -> dict[str, Any]:
    achieved = {"float32": f"{speed} GFLOPS"}
    return {
        "count": 1,
        "devices": {"type": "cpu", "cores": cores, "count": 4, "achieved": achieved},
        "intra": {"type": "loopback"},
        "host": {"memory": "8 GiB", "cores": cores},
    }


SAMPLES = {
    CollectiveWork(op="send", bytes=size, group_size=2, nodes=2, backend="gloo"): (
        round(50_000 + size / 1.25),
    )
    for size in (1 << 10, 1 << 20, 1 << 24)
}
EVEN = {(0, 1): 1.2e9, (1, 0): 1.2e9}
CLOCK = [ClockOffset(offset_ns=1_500_000, error_ns=40_000)]


def test_equal_hosts_are_counted_and_the_network_is_measured() -> None:
    found = joined([("a", [node()], []), ("b", [node(48)], [])], CLOCK, EVEN, SAMPLES)
    (entry,) = found.content["nodes"]
    assert entry["count"] == 2
    assert entry["devices"]["achieved"] == {"float32": "48 GFLOPS"}
    first, _ = cluster_from_mapping(found.content, "t").nodes
    assert first.nic.rate("send") == pytest.approx(1.25e9, rel=0.01)
    assert first.nic.latency_ns == pytest.approx(50_000, rel=0.01)
    assert found.notes == ["clock of b: +1.500 ms from a's (± 40.0 us)"]


def test_other_hosts_have_their_own_entry_and_stragglers_are_named() -> None:
    told = [("a", [node()], []), ("b", [node(20)], []), ("c", [node(cores=8)], [])]
    found = joined(told, [], EVEN, SAMPLES)
    assert [entry["count"] for entry in found.content["nodes"]] == [2, 1]
    assert found.notes == ["b computes at 40% of the hosts before it: a straggler, or busy now"]


def test_the_slower_direction_binds() -> None:
    # NVIDIA/nccl issue 1581: sends leave by a 1 GbE card.
    uneven = {(0, 1): 0.12e9, (1, 0): 1.2e9}
    found = joined([("a", [node()], []), ("b", [node()], [])], [], uneven, SAMPLES)
    assert found.content["nodes"][0]["nics"]["achieved"] == {"send": "0.12 GB/s"}
    assert found.notes[0].startswith("a to b carries 0.12 GB/s")


def test_one_process_of_each_host_looks() -> None:
    def rank(number: int, local: int) -> Rank:
        return Rank(rank=number, world_size=8, local_rank=local, local_world_size=4)

    assert node_place(rank(4, 0), {}) == (1, 2)
    assert node_place(rank(5, 1), {}) is None
    slurm = {"SLURM_NODEID": "3", "SLURM_NNODES": "4"}
    assert node_place(rank(4, 0), slurm) == (3, 4)


HOST = """
import json, sys
from claw_plan.executor.detect_cluster import detect_together
node = json.loads(sys.argv[2])
found = detect_together(int(sys.argv[1]), 2, lambda: ({"nodes": [node]}, []))
print(json.dumps(None if found is None else [found.content, found.notes]))
"""


@pytest.mark.slow
def test_two_processes_describe_a_cluster_together(tmp_path: Path) -> None:
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", HOST, str(place), json.dumps(node())],
            stdout=subprocess.PIPE,
            text=True,
            env=environment | {"CLAW_PLAN_HOST": f"h{place}"},
        )
        for place in range(2)
    ]
    answers = [json.loads(process.communicate(timeout=120)[0]) for process in hosts]
    assert answers[1] is None
    content, notes = answers[0]
    assert cluster_from_mapping(content, "t").num_devices == 8
    assert any(note.startswith("clock of h1:") for note in notes)
