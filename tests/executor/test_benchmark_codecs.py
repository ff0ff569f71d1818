from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from claw_plan.executor.benchmark_codecs import MEASURED
from claw_plan.planner.averaging import codec_works
from claw_plan.planner.supported import OF_MOMENTUM
from claw_plan.profiles.codecs import describe_codec

RANK = """
import pickle, sys, torch.distributed as dist
from claw_plan.executor.benchmark_codecs import measure_codecs
rank, store, answer = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
with open(answer, "wb") as file:
    pickle.dump(measure_codecs(dist.group.WORLD, elements=4096), file)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_each_codec_is_timed_under_the_keys_of_planning(tmp_path: Path) -> None:
    store = (tmp_path / "store").as_uri()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), store, str(tmp_path / f"{rank}.pickle")],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in ranks] == [0, 0]
    assert set(MEASURED) == {"one_bit", "top_k", "fp16", "fp8", "int8", "int4"}
    for rank in range(2):
        found = pickle.loads((tmp_path / f"{rank}.pickle").read_bytes())
        assert len(found) == 3 * len(MEASURED)
        for name in MEASURED:
            of_momentum = name in OF_MOMENTUM
            numel = 4 * 4096 if of_momentum else 4096
            works = codec_works(describe_codec(name), numel, 2, of_momentum)
            assert [work.target for work in works] == [
                f"codec.{name}.{what}" for what in ("encode", "mean", "decode")
            ]
            # Divided as the bytes that each moves; a step may be lost in noise.
            slowest = max(works, key=lambda work: work.bytes)
            for work in works:
                share = found[slowest][0] * work.bytes / slowest.bytes
                assert found[work][0] == pytest.approx(share, abs=2)
