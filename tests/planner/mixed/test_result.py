"""From a request on several kinds of devices to a plan, and back from its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from claw_plan.planner.errors import PlanError
from claw_plan.planner.mixed.result import ALIKE, plan_request, simulate_file
from claw_plan.planner.mixed.score import MixedScored
from claw_plan.planner.plan import save_plan
from claw_plan.planner.plan_check import check_plan
from claw_plan.planner.planning import PlanningRequest

GPT = Path(__file__).parents[3] / "examples" / "gpt_small.py"

CLUSTER = """name: two-kinds
nodes:
  - {count: 1, devices: {type: a100-sxm-80gb, count: 1}, nics: {type: ib-hdr, count: 1}}
  - {count: 1, devices: {type: h100-sxm-80gb, count: 1}, nics: {type: ib-ndr, count: 1}}
"""


@pytest.mark.slow
def test_two_kinds_share_a_plan_that_simulates_alike_and_is_not_run(tmp_path):
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    result = plan_request(
        PlanningRequest(
            model=GPT,
            cluster=str(tmp_path / "cluster.yaml"),
            global_batch=32,
            output_folder=tmp_path,
        )
    )
    runs = [scored for scored in result.baselines.values() if not isinstance(scored, str)]
    assert ALIKE in result.baselines
    assert all(result.best.step_time_ns <= scored.step_time_ns for scored in runs)
    save_plan(result.plan, tmp_path / "plan.yaml")
    assert simulate_file(tmp_path / "plan.yaml").step_time_ns == result.best.step_time_ns
    if isinstance(result.best, MixedScored):
        assert "cannot execute plans on unlike devices yet" in result.reasons[0]
        with pytest.raises(PlanError, match="not executed yet"):
            check_plan(result.plan, "plan.yaml")


@pytest.mark.slow
def test_pinned_knobs_are_those_of_equal_devices(tmp_path):
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    result = plan_request(
        PlanningRequest(
            model=GPT, cluster=str(tmp_path / "cluster.yaml"), global_batch=32, fix={"pp": 2}
        )
    )
    assert not isinstance(result.best, MixedScored) and result.best.candidate.pp == 2
