"""Predicted memory of plans with codecs, beside tensors that were alive in a real step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.memory import MemoryModel, StageMemory
from claw_plan.planner.plan import load_plan
from claw_plan.planner.plan_check import model_of_plan
from claw_plan.planner.problem import Problem, Training
from claw_plan.planner.shards import ShardSizes
from claw_plan.planner.trace import trace
from claw_plan.profiles.cluster_file import cluster_from_mapping
from claw_plan.profiles.cost_model import ClusterCostModel

RANK = Path(__file__).with_name("rank_coded_memory.py")

WAYS: dict[str, dict[str, Any]] = {
    "replicas": {"dp_replicate": 4},
    "replicas of shards": {"dp_replicate": 2, "dp_shard": 2},
    "zero 2": {"dp_shard": 4, "zero": 2, "microbatch_size": 1},
    "zero 3": {"dp_shard": 4},
}
CODECS = ("int8", "fp16")

LOW, HIGH = -0.03, 0.15
"""How far predictions may be off. Without a codec they are 4 to 7 % high here, for what is padded
and gathered of so small a model; of replicas the buckets hold the gradients, and that is tight."""


@pytest.fixture(scope="module")
def both(
    tiny_plan: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], tuple[StageMemory, dict[str, int]]]:
    """Of each way and codec what is predicted and what was found, all in one process."""
    plans = {
        (way, codec): tiny_plan(f"memory {way} {codec}", codec=codec, **knobs)
        for way, knobs in WAYS.items()
        for codec in CODECS
    }
    out = tmp_path_factory.mktemp("memory") / "found.json"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, RANK, out, *plans.values()], env=environment, check=True)
    memory = memory_of(next(iter(plans.values())))
    found = json.loads(out.read_text())
    return {
        which: (memory(load_plan(path).knobs()), tracked)
        for (which, path), tracked in zip(plans.items(), found, strict=True)
    }


def memory_of(path: Path) -> Callable[[Candidate], StageMemory]:
    """The planner's figure for plans of the same model."""
    plan = load_plan(path)
    model, settings = model_of_plan(plan, path), plan.training
    graph = trace(model, seq_len=model.seq_len(), dtype=settings.precision)
    cluster = cluster_from_mapping(plan.cluster, "cluster")
    training = Training(
        global_batch=settings.global_batch,
        seq_len=graph.seq_len,
        precision=settings.precision,
        optimizer=settings.optimizer,
        memory_headroom=0.0,
    )
    cost = ClusterCostModel(cluster)
    problem = Problem(graph=graph, cluster=cluster, cost=cost, training=training)
    model_memory = MemoryModel(problem, ShardSizes(graph))
    return lambda candidate: model_memory.stage(candidate, 0, 0, len(graph.units))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("codec", CODECS)
def test_the_peak_is_as_predicted(both: Any, way: str, codec: str) -> None:
    predicted, tracked = both[way, codec]
    assert LOW < predicted.peak_bytes / tracked["peak_bytes"] - 1 < HIGH


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_error_feedback_keeps_what_is_predicted(both: Any, way: str) -> None:
    """On a CPU twice, in turns; shards are padded to equal parts, a thousandth more."""
    predicted, tracked = both[way, "int8"]
    assert predicted.parts["residuals"] == pytest.approx(2 * tracked["residual_bytes"], rel=0.002)
    assert "residuals" not in both[way, "fp16"][0].parts
