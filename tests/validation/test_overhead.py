"""What a step does beside hand-written scripts of the same parallelism: counts and bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "overhead.py"

ALL = "[0, 1, 2, 3]"
NEIGHBOURS = ((1,), (0, 2), (1, 3), (2,))
GROUPS = dict.fromkeys(("ddp", "fsdp2", "tp"), [{ALL}] * 4) | {
    # Messages of a pipeline, and the sum of losses over all.
    "pp": [
        {ALL} | {f"{end} {other} of {ALL}" for other in others for end in ("src", "dst")}
        for others in NEIGHBOURS
    ],
    # Ranks (dp, tp) in order: tensor parallelism inside pairs, shards over every second rank.
    "fsdp2_tp": [{ALL, f"[{r // 2 * 2}, {r // 2 * 2 + 1}]", f"[{r % 2}, {r % 2 + 2}]"}
                 for r in range(4)],
}  # fmt: skip
"""The ranks of the groups that each rank must be seen to call."""

VIEWS = {"detach", "view", "split", "slice", "expand"}
"""Kernels that move nothing."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    found = tmp_path_factory.mktemp("overhead") / "found.json"
    starter = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    small = {"BENCH_WIDTH": "64", "BENCH_LENGTH": "16", "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, *starter, str(BENCH), "--pairs=0", f"--json={found}"],
        env=os.environ | small,
        timeout=400,
        check=True,
    )
    return {result["name"]: result["ranks"] for result in json.loads(found.read_text())}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tp", "pp", "fsdp2_tp"])
def test_a_step_does_what_a_hand_written_one_does(
    name: str, results: dict[str, list[dict[str, Any]]]
) -> None:
    assert len(results[name]) == 4
    # What DTensor or torch's pipelining views, and how often, is not for us to choose.
    left_out = set() if name in ("ddp", "fsdp2") else VIEWS
    for number, rank in enumerate(results[name]):
        ours, theirs = rank["ours"], rank["theirs"]
        assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-5)
        assert ours["collectives"] == theirs["collectives"]
        groups = {called.split(" ", 2)[2] for called in ours["collectives"]}
        assert groups == GROUPS[name][number]
        kernels = [
            {kernel: count for kernel, count in side["kernels"].items() if kernel not in left_out}
            for side in (ours, theirs)
        ]
        assert kernels[0] == kernels[1]
        assert ours["peak_bytes"] <= 1.03 * theirs["peak_bytes"]
