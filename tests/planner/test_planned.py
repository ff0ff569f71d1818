"""A plan file is opened with all that scoring it needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from claw_plan.planner.plan import save_plan
from claw_plan.planner.planned import on_cluster, open_planned
from claw_plan.planner.planning import PlanningRequest, make_plan

SMALL = Path(__file__).parents[2] / "examples" / "gpt_small.py"


@pytest.mark.slow
def test_a_plan_opens_as_it_was_planned(tmp_path):
    request = PlanningRequest(
        model=SMALL, cluster="2xdgx-a100-80gb", global_batch=8, fix={"dp_replicate": 4, "tp": 1,
        "pp": 1, "dp_shard": 1}, output_folder=tmp_path,
    )  # fmt: skip
    result = make_plan(request)
    save_plan(result.plan, tmp_path / "plan.yaml")
    planned = open_planned(tmp_path / "plan.yaml", memory_headroom=0.2)
    assert planned.candidate == result.best.candidate and planned.cuts == result.best.cuts
    assert planned.scored.step_time_ns == result.best.step_time_ns
    assert (planned.cluster.num_devices, planned.problem.cluster.num_devices) == (16, 8)
    assert planned.problem.training.memory_headroom == 0.2
    slower = [replace(n, device=replace(n.device, memory_bytes=1)) for n in planned.cluster.nodes]
    moved = on_cluster(planned.problem, replace(planned.cluster, nodes=tuple(slower)), None)
    assert moved.graph is planned.problem.graph and moved.device.memory_bytes == 1
