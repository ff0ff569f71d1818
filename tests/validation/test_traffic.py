"""Collectives of a sharded step against those the real fully_shard makes.

On a fake group of 64 ranks, Llama-3-8B's shape in bf16 with fp32 reduction made 65 all-gathers of
27.958 GiB and 33 reduce-scatters of 29.915 GiB in all (counted below DTensor, torch 2.13): every
block is gathered twice and the root once; each group is reduced once.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.lower import lower
from claw_plan.planner.model_source import load_model
from claw_plan.planner.problem import Problem, Training
from claw_plan.planner.score import Scorer
from claw_plan.planner.shards import ROOT
from claw_plan.planner.trace import trace
from claw_plan.profiles.cluster_file import load_cluster
from claw_plan.profiles.cost_model import ClusterCostModel
from claw_plan.profiles.units import gib

CONFIG = Path(__file__).parents[2] / "examples" / "llama-3-8b" / "config.json"


@pytest.mark.slow
def test_gathers_and_reductions_of_llama_8b_over_64_ranks():
    cluster = load_cluster("8xdgx-h100")
    problem = Problem(
        graph=trace(load_model(CONFIG), seq_len=2048, dtype="bfloat16"),
        cluster=cluster,
        cost=ClusterCostModel(cluster, None),
        training=Training(
            global_batch=64,
            seq_len=2048,
            precision="bfloat16",
            optimizer="adamw",
            memory_headroom=0.1,
        ),
    )
    scorer = Scorer(problem)
    units = len(problem.graph.units)
    tasks = lower(problem, scorer.shards, Candidate(dp_shard=64), ((0, units),)).graph
    groups = scorer.shards.groups(0, units, 1, 64)

    def sizes(verb, element_bytes):
        names = [re.fullmatch(rf"{verb} (?:unit (\d+)|root)", name) for name in tasks.name]
        found = [int(match[1]) if match[1] else ROOT for match in names if match]
        return [element_bytes * 64 * groups[group].shard for group in found]

    gathers, reductions = sizes("gather", 2), sizes("reduce", 4)
    assert (len(gathers), len(reductions)) == (65, 33)
    assert gib(sum(gathers)) == pytest.approx(27.958, abs=1e-3)
    assert gib(sum(reductions)) == pytest.approx(29.915, abs=1e-3)
