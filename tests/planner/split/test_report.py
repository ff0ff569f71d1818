from __future__ import annotations

from pathlib import Path

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.model_source import LoadedModel, load_model
from claw_plan.planner.problem import Problem, Training
from claw_plan.planner.split.report import split_lines
from claw_plan.planner.trace import trace
from claw_plan.profiles.cluster_file import load_cluster
from claw_plan.profiles.cost_model import ClusterCostModel

GPT = Path(__file__).parents[3] / "examples" / "gpt.py"


def posed(heads: int, width: int) -> tuple[LoadedModel, Problem]:
    model = load_model(
        GPT,
        build=f"GPT(GPTConfig(vocab_size=66, block_size=1024, n_head={heads}, n_embd={width}, "
        "n_layer=2))",
        inputs="idx=int64[B,1024]<66 targets=int64[B,1024]<66",
    )
    cluster = load_cluster("dgx-h100")
    training = Training(
        global_batch=8, seq_len=1024, precision="bfloat16", optimizer="adamw", memory_headroom=0.1
    )
    graph = trace(model, seq_len=1024, dtype="bfloat16")
    return model, Problem(
        graph=graph, cluster=cluster, cost=ClusterCostModel(cluster), training=training
    )


@pytest.mark.slow
def test_heads_that_do_not_divide_are_not_named() -> None:
    (line,) = split_lines(*posed(12, 3072), Candidate(tp=8))
    assert ": mlp.c_fc by columns, mlp.c_proj by rows;" in line and "attn" not in line


@pytest.mark.slow
def test_small_blocks_are_told_not_to_pay() -> None:
    (line,) = split_lines(*posed(4, 32), Candidate(tp=2))
    assert "nothing is divided 2 ways, for none of it pays" in line
    assert "the plan divides attn.c_attn" in line


@pytest.mark.slow
def test_without_tensor_parallelism_there_is_nothing_to_say() -> None:
    assert split_lines(*posed(4, 32), Candidate()) == ()
