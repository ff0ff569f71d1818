"""Predicted peak memory against torch's own tracker on a fake group of 64 ranks.

Llama-3-8B's shape; 4 layers here, so that the peak is not always at the same place and the suite
stays fast. bench/memory.py does all 32.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
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
def graph(tmp_path_factory):
    config = json.loads(CONFIG.read_text()) | {"num_hidden_layers": LAYERS}
    path = tmp_path_factory.mktemp("llama") / "config.json"
    path.write_text(json.dumps(config))
    return trace(load_model(path), seq_len=SEQ, dtype="bfloat16")


def predicted_bytes(graph, candidate):
    cluster = load_cluster("8xdgx-h100")
    training = Training(
        global_batch=candidate.dp,
        seq_len=SEQ,
        precision="bfloat16",
        optimizer="adamw",
        memory_headroom=0.0,
    )
    problem = Problem(
        graph=graph, cluster=cluster, cost=ClusterCostModel(cluster, None), training=training
    )
    memory = Scorer(problem).memory.stage(candidate, 0, 0, len(graph.units))
    return memory.peak_bytes - memory.parts["context"]  # the tracker sees tensors only


def tracked_bytes(candidate):
    command = [sys.executable, str(TRACKER), "--layers", str(LAYERS), "--seq", str(SEQ)]
    command += ["--replicate", str(candidate.dp_replicate), "--dp", str(candidate.dp_shard)]
    command += ["--tp", str(candidate.tp)]
    command += ["--recompute"] if candidate.recompute == "full" else []
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return json.loads(done.stdout.splitlines()[-1])["peak_bytes"]


FSDP = Candidate(dp_shard=64)
TP = Candidate(dp_replicate=8, tp=8)
BOTH = Candidate(dp_shard=8, tp=8)


@pytest.mark.parametrize("candidate", [FSDP, TP, BOTH], ids=["fsdp", "tp", "fsdp-tp"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_within_five_percent_of_the_tracker(graph, candidate, recompute):
    candidate = replace(candidate, recompute=recompute)
    predicted, tracked = predicted_bytes(graph, candidate), tracked_bytes(candidate)
    assert predicted == pytest.approx(tracked, rel=0.05)
