"""A degree that divides only some of a block's modules trains like one process.

The tiny GPT has 6 heads and 192 inner columns: four ranks share the columns, and every one of
them runs the whole attention. With the batch whole and in microbatches that run again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from claw_plan.executor.verify import verify_plans
from claw_plan.planner.plan import save_plan
from claw_plan.planner.planning import PlanningRequest, make_plan

pytestmark = [pytest.mark.slow]

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
CLUSTER = """
name: four
nodes:
  - count: 1
    devices: {type: cpu, cores: 4, count: 4, memory: 4 GiB}
"""
BUILD = "GPT(GPTConfig(vocab_size=66, block_size=24, n_head=6, n_embd=48, n_layer=2))"
INPUTS = "idx=int64[B,24]<66 targets=int64[B,24]<66"
WAYS = ({"microbatch_size": 4}, {"recompute": "full", "microbatch_size": 2})


def test_four_ranks_share_the_columns_of_six_heads(tmp_path: Path) -> None:
    cluster = tmp_path / "four.yaml"
    cluster.write_text(CLUSTER)
    paths = []
    for number, way in enumerate(WAYS):
        request = PlanningRequest(
            model=GPT,
            cluster=str(cluster),
            build=BUILD,
            inputs=INPUTS,
            global_batch=4,
            clip_norm=0.5,
            fix={"tp": 4, **way},
            output_folder=tmp_path,
        )
        plan = make_plan(request).plan
        inside = [rule.modules for rule in plan.tensor_parallel if ".h[" in rule.modules]
        blocks = "transformer.h[*].mlp"
        assert inside == [blocks, f"{blocks}.c_fc", f"{blocks}.c_proj"]
        paths.append(tmp_path / f"{number}.yaml")
        save_plan(plan, paths[-1])
    for result in verify_plans(paths, steps=2):
        assert result.ok and result.fp64_max_param_diff < 1e-10, result
