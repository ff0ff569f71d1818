"""A plan file explained, alone and against another."""

from __future__ import annotations

from pathlib import Path

import pytest

from claw_plan.planner.explanation import explain
from claw_plan.planner.plan import save_plan
from claw_plan.planner.planning import PlanningRequest, make_plan

SMALL = Path(__file__).parents[2] / "examples" / "gpt_small.py"


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    for name, fix in (("best", {}), ("divided", {"tp": 2, "pp": 2})):
        request = PlanningRequest(
            model=SMALL, cluster="dgx-a100-80gb", global_batch=16, fix=fix, output_folder=folder
        )
        save_plan(make_plan(request).plan, folder / f"{name}.yaml")
    return folder


@pytest.mark.slow
def test_why_this_and_by_how_much_the_other_is_slower(plans):
    found = explain(plans / "best.yaml", against=plans / "divided.yaml", replan=False)
    own = found.scored.step_time_ns
    assert found.what_ifs == ()
    assert sum(found.binding.parts_ns.values()) == own
    assert all(each.step_time_ns >= own for each in found.neighbours if each.fits)
    times = [each.step_time_ns for each in found.neighbours if each.fits]
    assert times == sorted(times)
    assert {each.knob for each in found.neighbours} >= {"tp", "pp", "recompute"}
    other = found.against
    assert other.name == "divided.yaml" and other.scored.candidate.tp == 2
    assert sum(other.parts_ns.values()) == other.scored.step_time_ns - own
