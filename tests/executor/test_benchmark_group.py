from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from claw_plan.executor.benchmark_group import OPS, _expected_ns

WORLD = 3

RANK = """
import pickle, sys, torch, torch.distributed as dist
from claw_plan.executor.benchmark_group import measure_directions, measure_group, measure_replicas
rank, store, answer = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=3)
cpu = torch.device("cpu")
whole = measure_group(range(3), cpu, nodes=1, sizes_bytes=(1 << 10, 1 << 14), repeats=3)
pair, part = dist.new_group([0, 2]), {}
if rank in (0, 2):
    part = measure_group([0, 2], cpu, nodes=2, group=pair, ops=("broadcast",), sizes_bytes=(4096,))
brief = measure_group(
    range(3), cpu, nodes=1, ops=("all_gather",), sizes_bytes=(1024, 4096), seconds=0
)
replicas = measure_replicas(range(3), 3, dist.group.WORLD)
directions = measure_directions(rank, 3)
with open(answer, "wb") as file:
    pickle.dump((whole, part, directions, brief, replicas), file)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_all_ranks_agree_on_the_slowest_times(tmp_path: Path) -> None:
    store = (tmp_path / "store").as_uri()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), store, str(tmp_path / f"{rank}.pickle")],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(WORLD)
    ]
    assert [process.wait(timeout=120) for process in ranks] == [0] * WORLD
    by_rank = [pickle.loads((tmp_path / f"{rank}.pickle").read_bytes()) for rank in range(WORLD)]
    whole, part, directions, brief, replicas = by_rank[0]
    assert by_rank[1][0] == whole == by_rank[2][0]
    assert {work.op for work in whole} == set(OPS)
    assert all(len(samples) >= 3 and min(samples) > 0 for samples in whole.values())
    assert {work.group_size for work in whole if work.op == "send"} == {2}
    ((work, _),) = part.items()
    assert (work.op, work.group_size, work.nodes) == ("broadcast", 2, 2)
    assert by_rank[1][1] == {}
    assert len(directions) == 6 and min(directions.values()) > 1e6
    assert by_rank[2][2] == directions
    # The first size is timed in any case; no time is left for the next.
    assert [work.bytes for work in brief] == [1024]
    assert by_rank[1][3] == brief
    assert by_rank[2][4] == replicas
    assert {(work.op, work.group_size, work.nodes) for work in replicas} == {
        *((op, 3, 3) for op in ("all_reduce", "all_gather", "all_to_all")),
        ("send", 2, 2),
    }


def test_the_next_size_is_expected_on_the_line_of_the_last_two() -> None:
    assert _expected_ns(4, []) == 0
    assert _expected_ns(4, [(1, 100.0)]) == 100
    assert _expected_ns(40, [(1, 500.0), (10, 100.0), (20, 150.0)]) == 250
    assert _expected_ns(40, [(10, 100.0), (20, 90.0)]) == 90
