"""Predicted memory of plans with codecs, beside tensors that were alive in a real step."""

from __future__ import annotations

import json
import os
import shutil
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

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt.py"
GPT = {
    "build": "GPT(GPTConfig(vocab_size=509, block_size=32, n_layer=4, n_head=4, n_embd=128))",
    "inputs": "idx=int64[B,32]<509 targets=int64[B,32]<509",
}
"""860,000 parameters, so that tensors of a few elements are nothing."""

LIBRARY_S = [("replicas", "none")]
"""DistributedDataParallel's own mean, which a fake group cannot stand for."""

ZERO_2 = {"dp_shard": 4, "zero": 2, "microbatch_size": 1}
WAYS: dict[str, dict[str, Any]] = {
    "replicas": {"dp_replicate": 4},
    "replicas of shards": {"dp_replicate": 2, "dp_shard": 2},
    "zero 2": ZERO_2,
    "zero 2 of three microbatches": ZERO_2 | {"global_batch": 12},
    "zero 3": {"dp_shard": 4},
}
CODECS = ("none", "int8", "fp16")

LOW, HIGH = -0.005, 0.035
"""How far predictions may be off. Low by scalars and indices, a thousandth. High because all of a
block's gradients are taken to be there when its activations are most, while kernels make them one
by one: activations of a block are 345 kB here, of 7.8 MB or more."""


@pytest.fixture(scope="module")
def both(
    tmp_path_factory: pytest.TempPathFactory, write_any: Callable[..., Path]
) -> dict[tuple[str, str], tuple[StageMemory, dict[str, int]]]:
    """Of each way and codec what is predicted and what was found, all in one process."""
    folder = tmp_path_factory.mktemp("memory")
    model, out = folder / EXAMPLE.name, folder / "found.json"
    shutil.copy(EXAMPLE, model)
    blocks = [f"transformer.h.{index}" for index in range(4)]
    plans = {
        (way, codec): write_any(model, f"{way} {codec}", blocks, codec=codec, **GPT, **knobs)
        for way, knobs in WAYS.items()
        for codec in CODECS
        if (way, codec) not in LIBRARY_S
    }
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, RANK, out, *plans.values()], env=environment, check=True)
    memory = memory_of(next(iter(plans.values())))
    found = json.loads(out.read_text())
    tracked = dict(zip(plans, found, strict=True))
    return {which: (predicted(memory, path), tracked[which]) for which, path in plans.items()}


def predicted(memory: Callable[..., StageMemory], path: Path) -> StageMemory:
    plan = load_plan(path)
    return memory(plan.knobs(), plan.training.global_batch)


def memory_of(path: Path) -> Callable[[Candidate, int], StageMemory]:
    """The planner's figure for plans of the same model, of a candidate and its global batch."""
    plan = load_plan(path)
    model, settings = model_of_plan(plan, path), plan.training
    graph = trace(model, seq_len=model.seq_len(), dtype=settings.precision)
    cluster = cluster_from_mapping(plan.cluster, "cluster")
    cost, shards = ClusterCostModel(cluster), ShardSizes(graph)

    def memory(candidate: Candidate, global_batch: int) -> StageMemory:
        training = Training(
            global_batch=global_batch,
            seq_len=graph.seq_len,
            precision=settings.precision,
            optimizer=settings.optimizer,
            memory_headroom=0.0,
        )
        problem = Problem(graph=graph, cluster=cluster, cost=cost, training=training)
        return MemoryModel(problem, shards).stage(candidate, 0, 0, len(graph.units))

    return memory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "codec"),
    [(way, codec) for way in WAYS for codec in CODECS if (way, codec) not in LIBRARY_S],
)
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
