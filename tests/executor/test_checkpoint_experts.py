"""Plans that share experts otherwise, or not at all, read each other's checkpoints bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from claw_plan.executor.job import VERIFY, Job
from claw_plan.executor.launch import start_ranks

HERE = Path(__file__).parent
CHAIN = [sys.executable, str(HERE / "checkpoint_chain.py")]
BLOCKS = [f"blocks.{index}" for index in range(4)]

PLANS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"dp_replicate": 2, "ep": 2},
        {"dp_shard": 2},
        {"dp_shard": 2, "ep": 2, "zero": 1},
        {"dp_replicate": 2},
    ],
    4: [
        {"dp_shard": 4, "ep": 2},
        {"dp_replicate": 4, "ep": 4},
        {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
        {"pp": 2, "dp_shard": 2, "ep": 2},
        {"dp_replicate": 2, "dp_shard": 2, "ep": 4},
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Fused", "Listed"])
def test_any_ep_reads_what_any_other_wrote(
    kind: str, write_any: Callable[..., Path], tmp_path: Path
) -> None:
    """Two processes, then four: each plan reads the one before it and compares."""
    model, before = tmp_path / "expert_model.py", ""
    model.write_text((HERE / "expert_model.py").read_text())
    own = {"counted_by": ["number"]} if kind == "Fused" else {"listed": "each"}
    shared = [{"modules": "blocks[*].experts", "experts": 4} | own]
    for size, knobs in PLANS.items():
        plans = [
            write_any(
                model, f"chain{size}-{i}", BLOCKS, build=f"Mixture({kind})",
                inputs="ids=int64[B,12]<61", experts=shared if "ep" in one else None, **one,
            )
            for i, one in enumerate(knobs)
        ]  # fmt: skip
        folder = tmp_path / str(size)
        folder.mkdir()
        job = Job(kind=VERIFY, folder=folder, plans=tuple(plans), steps=1, resume=before)
        start_ranks(job, size, worker=CHAIN)
        before = str(folder / plans[-1].stem / "step-00000007")
