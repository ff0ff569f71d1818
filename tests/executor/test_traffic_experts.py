"""What ranks that share experts move is exactly what the planner predicts for balanced routing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from claw_plan.planner.graph import ModelGraph
from claw_plan.planner.plan import load_plan
from claw_plan.planner.plan_check import model_of_plan
from claw_plan.planner.plan_stages import stage_spans
from claw_plan.planner.problem import Problem, Training
from claw_plan.planner.shards import ShardSizes
from claw_plan.planner.trace import trace
from claw_plan.planner.traffic import Kind, Moved, differences, predict_traffic
from claw_plan.profiles.cluster_file import cluster_from_mapping
from claw_plan.profiles.cost_model import ClusterCostModel

HERE = Path(__file__).parent
BLOCKS = [f"blocks.{index}" for index in range(4)]

MIXED, PAIRS, FULL = {"precision": "bfloat16"}, {"microbatch_size": 2}, {"recompute": "full"}
CLIP, BUCKETS = {"clip_norm": 0.5}, {"bucket_bytes": 9000}

ACROSS = "over pp"

PLANS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"dp_replicate": 2, "ep": 2} | CLIP,
        {"dp_replicate": 2, "ep": 2} | MIXED | FULL,
        {"dp_shard": 2, "ep": 2} | PAIRS,
        {"dp_shard": 2, "ep": 2, "zero": 1} | FULL,
    ],
    4: [
        {"dp_replicate": 4, "ep": 2} | BUCKETS,
        {"dp_shard": 4, "ep": 2} | MIXED,
        {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
        {"dp_replicate": 2, "dp_shard": 2, "ep": 4} | CLIP,
        {"pp": 2, "dp_shard": 2, "ep": 2},
        {"pp": 2, "dp_replicate": 2, "ep": 2} | FULL,
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_as_much_moves_as_is_predicted(
    world: int, write_any: Callable[..., Path], tmp_path: Path
) -> None:
    paths = list(_written(world, write_any, tmp_path))
    graphs: dict[str, ModelGraph] = {}
    counted = _counted(world, paths, tmp_path)
    # Between stages travel the hidden state, which is predicted, and the sum of balancing losses.
    wrong = {
        path.stem: found
        for path, ranks in zip(paths, counted, strict=True)
        if (found := [d for d in differences(_predicted(path, graphs), ranks) if ACROSS not in d])
    }
    assert not wrong
    assert all(
        any(kind.op == "all_to_all" for kind in rank) for ranks in counted for rank in ranks
    )


def _written(world: int, write_any: Callable[..., Path], folder: Path) -> Iterator[Path]:
    model = folder / "expert_model.py"
    model.write_text((HERE / "expert_model.py").read_text())
    shared = [{"modules": "blocks[*].experts", "experts": 4, "counted_by": ["number"]}]
    for index, ways in enumerate(PLANS[world]):
        yield write_any(
            model, f"moves-{index}", BLOCKS, build="Mixture(Fused, balanced=True)",
            inputs="ids=int64[B,12]<61", experts=shared, **ways,
        )  # fmt: skip


def _counted(world: int, paths: list[Path], folder: Path) -> list[list[dict[Kind, Moved]]]:
    """Of each plan, what its ranks counted; all plans run in one set of processes."""
    program = [sys.executable, str(HERE / "rank_traffic.py")]
    ranks = [
        subprocess.Popen(
            [*program, str(rank), str(world), str(folder), *map(str, paths)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(world)
    ]
    assert [rank.wait() for rank in ranks] == [0] * world
    by_rank = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]
    return [
        [{Kind(*row[:3]): Moved(*row[3:]) for row in rank[index]} for rank in by_rank]
        for index in range(len(paths))
    ]


def _predicted(path: Path, graphs: dict[str, ModelGraph]) -> list[dict[Kind, Moved]]:
    plan = load_plan(path)
    settings, knobs = plan.training, plan.knobs()
    if settings.precision not in graphs:
        model = model_of_plan(plan, path)
        graphs[settings.precision] = trace(model, seq_len=None, dtype=settings.precision)
    cluster = cluster_from_mapping(plan.cluster, "cluster")
    problem = Problem(
        graph=graphs[settings.precision],
        cluster=cluster,
        cost=ClusterCostModel(cluster),
        training=Training(
            global_batch=settings.global_batch,
            seq_len=None,
            precision=settings.precision,
            optimizer=settings.optimizer,
            memory_headroom=0.0,
            clip_norm=settings.clip_norm,
        ),
    ).for_ep(knobs.ep)
    starts = [0, *(start + 1 for start, _ in stage_spans(plan)[1:])]
    cuts = tuple(zip(starts, [*starts[1:], len(problem.graph.units)], strict=True))
    return predict_traffic(problem, ShardSizes(problem.graph), knobs, cuts)
