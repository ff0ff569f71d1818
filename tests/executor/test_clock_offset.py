from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.executor.clock_offset import ClockOffset, best_offset


def test_the_shortest_exchange_counts() -> None:
    # There the clock is 1000 ahead; the second exchange was held up on its way back.
    stamps = [(0, 1010, 20), (100, 1110, 400)]
    assert best_offset(stamps) == ClockOffset(offset_ns=1000, error_ns=10)


@given(st.integers(-(10**9), 10**9), st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_true_offset_lies_within_the_error(ahead: int, there: int, back: int) -> None:
    found = best_offset([(0, there + ahead, there + back)])
    assert abs(found.offset_ns - ahead) <= found.error_ns


RANK = """
import json, sys, torch.distributed as dist
from claw_plan.executor.clock_offset import measure_offsets
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
found = measure_offsets(rank, 2, exchanges=8)
print(json.dumps([(offset.offset_ns, offset.error_ns) for offset in found]))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_of_one_host_have_one_clock(tmp_path: Path) -> None:
    store = (tmp_path / "store").as_uri()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), store],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    first, second = (json.loads(process.communicate(timeout=60)[0]) for process in ranks)
    assert second == []
    ((offset_ns, error_ns),) = first
    assert abs(offset_ns) <= error_ns
