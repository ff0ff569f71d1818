"""What every rank moves in a step is exactly what the planner predicts, in real processes.

One plan or more of every composition offered and every schedule, with everything that changes what
is moved: zero, buckets, sequence parallelism, recomputing, lower precision, clipping, uneven
stages, a tied and unevenly divided vocabulary, and hidden states that are relayed across stages.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from claw_plan.planner.plan import load_plan
from claw_plan.planner.schedules import SCHEDULES
from claw_plan.planner.supported import COMPOSITIONS
from claw_plan.planner.traffic import Kind, Moved, differences

RANK = Path(__file__).with_name("rank_traffic.py")

SP, MIXED, PAIRS = {"sequence_parallel": True}, {"precision": "bfloat16"}, {"microbatch_size": 2}
FULL, HALF = {"recompute": "full"}, {"recompute": "half"}
CLIP, OFFLOAD = {"clip_norm": 0.5}, {"offload": "optimizer"}
BUCKETS, SCALED = {"bucket_bytes": 9000}, {"precision": "float16"}
PLANNED = {"buckets": (11, 30, 1, 10)}
TOGETHER, NEAR = {"blocks_per_group": 3}, {"dp_shard": 4, "reshard_ranks": 2}
FIRST = FULL | {"recompute_blocks": 1}
REPLICATE, SHARD, TP, PP = {"dp_replicate": 2}, {"dp_shard": 2}, {"tp": 2}, {"pp": 2}
CP, HEADS = {"cp": 2}, {"cp_comm_type": "a2a"}

TINY: dict[int, list[dict[str, Any]]] = {
    2: [
        REPLICATE,
        REPLICATE | BUCKETS | FULL,
        REPLICATE | PLANNED | PAIRS,
        REPLICATE | MIXED,
        SHARD | HALF,
        SHARD | {"zero": 2},
        SHARD | {"zero": 1} | SCALED | CLIP,
        TP | HALF,
        TP | SP | HALF,
        TP | SP | FULL | PAIRS,
        TP | SP | FIRST,
        SHARD | TOGETHER | FIRST,
        SHARD | TOGETHER | MIXED | {"zero": 2},
        PP | {"cuts": [1]} | PAIRS | OFFLOAD,
        CP | MIXED,
        CP | FULL | PAIRS | CLIP,
        CP | HEADS | HALF | {"zero": 1},
        CP | HEADS | TOGETHER | FIRST,
    ],
    4: [
        REPLICATE | SHARD | MIXED,
        REPLICATE | TP | SP | CLIP,
        REPLICATE | TP | BUCKETS,
        SHARD | TP | SP | FULL,
        SHARD | TP | {"zero": 1} | CLIP,
        PP | TP | SP,
        PP | SHARD | FULL,
        PP | REPLICATE | BUCKETS | {"schedule": "GPipe"},
        {"pp": 4} | CLIP,
        CP | SHARD | CLIP,
        CP | REPLICATE | HEADS | {"zero": 2},
        CP | PP | FULL | CLIP,
        CP | PP | HEADS | {"zero": 1} | PAIRS,
        NEAR | MIXED,
        NEAR | PAIRS | TOGETHER | FIRST,
        PP | SHARD | TOGETHER | FIRST,
    ],
    8: [
        REPLICATE | SHARD | TP | SP,
        PP | SHARD | TP | SP,
        PP | REPLICATE | TP | SP | CLIP,
        PP | REPLICATE | SHARD | MIXED,
        TP | SP | NEAR,
        PP | NEAR | TOGETHER,
        REPLICATE | NEAR,
    ],
}
DEEP: list[dict[str, Any]] = [
    {"schedule": "Interleaved1F1B", "stages_per_rank": 3},
    {"schedule": "InterleavedZeroBubble", "stages_per_rank": 2},
    {"schedule": "ZBVZeroBubble", "stages_per_rank": 2} | CLIP,
    {"schedule": "DualPipeV", "stages_per_rank": 2} | FULL,
]
CONFIGS: list[dict[str, Any]] = [PP, TP | SP, REPLICATE, SHARD | FULL]


Make = Callable[..., Path]
Predict = Callable[[Path], list[dict[Kind, Moved]]]


def test_every_composition_and_schedule_is_here() -> None:
    one = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1, "cp": 1}
    chosen = [ways for some in TINY.values() for ways in some]
    axes = {frozenset(a for a in one if ways.get(a, 1) > 1) for ways in chosen}
    offered = {known.axes for known in COMPOSITIONS if "ep" not in known.axes}
    assert offered - {frozenset()} == axes  # test_traffic_experts.py has those with ep
    assert {w.get("schedule", "1F1B") for w in [*chosen, *DEEP]} == set(SCHEDULES)


def counted(plans: list[Path], folder: Path) -> list[list[dict[Kind, Moved]]]:
    """Of each plan, what its ranks counted; all plans run in one set of processes."""
    world = load_plan(plans[0]).knobs().num_devices
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(rank), str(world), str(folder), *map(str, plans)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(world)
    ]
    assert [rank.wait() for rank in ranks] == [0] * world
    by_rank = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]
    return [
        [{Kind(*row[:3]): Moved(*row[3:]) for row in rank[index]} for rank in by_rank]
        for index in range(len(plans))
    ]


def check(plans: list[Path], folder: Path, predicted: Predict) -> None:
    wrong = {}
    for path, ranks in zip(plans, counted(plans, folder), strict=True):
        assert all(ranks), path.stem
        if found := differences(predicted(path), ranks):
            wrong[path.stem] = found
    assert not wrong


@pytest.mark.slow
def test_on_two_processes(
    tiny_plan: Make, deep_plan: Make, config_plan: Make, tmp_path: Path, predicted_traffic: Predict
) -> None:
    plans = [tiny_plan(f"moves-{i}", **ways) for i, ways in enumerate(TINY[2])]
    plans += [deep_plan(f"moves-{i}", **PP, **ways) for i, ways in enumerate(DEEP)]
    for family in ("llama", "gpt2"):
        plans += [config_plan(family, f"moves-{i}", **ways) for i, ways in enumerate(CONFIGS)]
    check(plans, tmp_path, predicted_traffic)


@pytest.mark.slow
@pytest.mark.parametrize("world", [4, pytest.param(8, marks=pytest.mark.sweep)])
def test_on_more_processes(
    world: int, tiny_plan: Make, tmp_path: Path, predicted_traffic: Predict
) -> None:
    plans = [tiny_plan(f"moves-{i}", **ways) for i, ways in enumerate(TINY[world])]
    check(plans, tmp_path, predicted_traffic)
