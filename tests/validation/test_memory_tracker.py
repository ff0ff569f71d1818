"""Predicted peak memory against torch's own tracker on a fake group of 64 ranks.

Llama-3-8B's shape; 4 layers here, so that the peak is not always at the same place and the suite
stays fast. bench/memory.py does all 32.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.model_source import load_model
from claw_plan.planner.problem import Problem, Training
from claw_plan.planner.score import Scorer
from claw_plan.planner.trace import trace
from claw_plan.profiles.cluster_file import load_cluster
from claw_plan.profiles.cost_model import ClusterCostModel

pytestmark = pytest.mark.slow
TRACKER = Path(__file__).with_name("torch_tracker.py")
CONFIG = Path(__file__).parents[2] / "examples" / "llama-3-8b" / "config.json"
LAYERS, SEQ = 4, 8192


@pytest.fixture(scope="module")
def graph_in(tmp_path_factory):
    """The trace in a precision, made once."""
    config = json.loads(CONFIG.read_text()) | {"num_hidden_layers": LAYERS}
    path = tmp_path_factory.mktemp("llama") / "config.json"
    path.write_text(json.dumps(config))
    return lru_cache(lambda dtype: trace(load_model(path), seq_len=SEQ, dtype=dtype))


def predicted_bytes(graph, candidate, stage=0):
    cluster = load_cluster("8xdgx-h100")
    training = Training(
        global_batch=candidate.dp * microbatches(candidate),
        seq_len=SEQ,
        precision=graph.dtype,
        optimizer="adamw",
        memory_headroom=0.0,
    )
    problem = Problem(
        graph=graph, cluster=cluster, cost=ClusterCostModel(cluster, None), training=training
    )
    units, each = len(graph.units), (len(graph.units) - 2) // candidate.pp
    start = 1 + stage * each if stage else 0
    stop = units if stage == candidate.pp - 1 else 1 + (stage + 1) * each
    memory = Scorer(problem).memory.stage(candidate, stage, start, stop)
    return memory.peak_bytes - memory.parts["context"]  # the tracker sees tensors only


def microbatches(candidate):
    return 2 * candidate.pp if candidate.pp > 1 else 1


def tracked_bytes(candidate, stage=0, ddp=False):
    command = [sys.executable, str(TRACKER), "--layers", str(LAYERS), "--seq", str(SEQ)]
    command += ["--replicate", str(candidate.dp_replicate), "--dp", str(candidate.dp_shard)]
    command += ["--tp", str(candidate.tp), "--stages", str(candidate.pp), "--stage", str(stage)]
    command += ["--microbatches", str(microbatches(candidate))]
    command += ["--recompute"] if candidate.recompute == "full" else []
    command += ["--sequence"] if candidate.sequence_parallel else []
    command += [] if candidate.zero == 3 else ["--keep-gathered"]
    command += ["--recompute-blocks", str(candidate.recompute_blocks)]
    command += ["--group", str(candidate.blocks_per_group)]
    command += ["--reshard", str(candidate.reshard_ranks)]
    command += ["--ddp"] if ddp else []
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return json.loads(done.stdout.splitlines()[-1])["peak_bytes"]


PLANS = {
    "fsdp": Candidate(dp_shard=64),
    "fsdp kept": Candidate(dp_shard=64, zero=2),
    "tp": Candidate(dp_replicate=8, tp=8),
    "tp sp": Candidate(dp_replicate=8, tp=8, sequence_parallel=True),
    "fsdp tp": Candidate(dp_shard=8, tp=8),
    "fsdp tp sp": Candidate(dp_shard=8, tp=8, sequence_parallel=True),
    "pp": Candidate(pp=2, dp_shard=8, zero=1),
    "ddp": Candidate(dp_replicate=8),
    "first blocks": Candidate(dp_shard=64, recompute_blocks=2),
    "near": Candidate(dp_shard=64, reshard_ranks=2),
    "together": Candidate(dp_shard=64, blocks_per_group=2),
}


def cases(names, recompute):
    for name in names:
        for stage in range(PLANS[name].pp):
            for mode in recompute:
                yield pytest.param(name, stage, mode, id=f"{name}-{stage}-{mode}")


@pytest.mark.parametrize(
    ("name", "stage", "recompute"),
    [
        *cases(("fsdp kept", "tp", "ddp", "together"), ("none",)),
        *cases(("fsdp", "tp sp", "fsdp tp", "pp", "first blocks", "near"), ("full",)),
    ],
)
def test_within_five_percent_of_the_tracker(graph_in, name, stage, recompute):
    """Each plan once, with or without recompute; bench/memory.py does both, and all 32 layers."""
    candidate, is_ddp = replace(PLANS[name], recompute=recompute), name == "ddp"
    graph = graph_in("float32" if is_ddp else "bfloat16")
    tracked = tracked_bytes(candidate, stage, is_ddp)
    assert predicted_bytes(graph, candidate, stage) == pytest.approx(tracked, rel=0.05)
