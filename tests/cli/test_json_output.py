from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from claw_plan.cli.json_output import PLAN_KEYS, infeasible_object, json_text, plan_object
from claw_plan.planner.baseline import Baseline


def printed(value: Any) -> Any:
    return json.loads(json_text(value))


def test_a_plan_has_the_documented_keys(result: Any) -> None:
    assert tuple(printed(plan_object(result))) == PLAN_KEYS


def test_units_are_those_of_the_keys(result: Any) -> None:
    value = printed(plan_object(result))
    assert value["step_time_ms"] == 40.0
    assert value["samples_per_s"] == 1600.0
    assert value["tokens_per_s"] == 1638400.0
    assert value["mfu"] == 0.5
    assert value["parts_ms"]["compute"] == 30.0
    memory = value["memory"][1]
    low, high = memory.pop("shown_gib")
    assert 76.0 < low < high
    assert 0.5 < memory.pop("out_of_memory_probability") < 1.0
    assert memory == {
        "stage": 1,
        "peak_gib": 76.0,
        "capacity_gib": 80.0,
        "parts": {"parameters": 1.0, "activations": 75.0, "buffers": 0.0},
    }


def test_the_plan_is_that_of_the_file(result: Any) -> None:
    value = printed(plan_object(result))
    assert value["plan"]["candidate"]["dp_shard"] == 4
    assert value["plan"] == result.plan.model_dump(mode="json")


def test_the_search_and_its_certificate(result: Any) -> None:
    assert printed(plan_object(result))["search"] == {
        "space": 48230,
        "space_per_knob": {"pp": 4, "tp": 3},
        "bound_pruned": 47911,
        "memory_pruned": 201,
        "simulated": 118,
        "seconds": 3.25,
        "gap": 0.0,
        "optimal": True,
        "cuts": {"groups": 3, "cuts": 7, "simulated": 2, "groups_left": 1, "gap": 0.125},
    }


def test_baselines_say_why_they_do_not_fit(result: Any) -> None:
    value = printed(plan_object(result))
    assert value["baselines"]["plain FSDP"]["step_time_ms"] == 60.0
    assert value["baselines"]["DDP"] == {
        "reason": "needs 12.0 GiB more than the 72.0 GiB of stage 0"
    }
    assert value["alternatives"][0]["candidate"]["dp_shard"] == 8


def test_the_users_own_setting_is_among_the_baselines(result: Any) -> None:
    result.given = Baseline(name="DeepSpeed: ds.json", scored=result.best, notes=("left open",))
    own = printed(plan_object(result))["baselines"]["DeepSpeed: ds.json"]
    assert (own["fits"], own["step_time_ms"], own["notes"]) == (True, 40.0, ["left open"])
    result.given = Baseline(name="DeepSpeed: ds.json", scored=None, refused="cp=2")
    own = printed(plan_object(result))["baselines"]["DeepSpeed: ds.json"]
    assert own == {"fits": None, "reason": "cp=2", "notes": []}


def test_when_nothing_fits_the_same_keys_stand_empty() -> None:
    value = printed(infeasible_object("12 GiB\n too much", {"tp=8": 2**31}))
    assert tuple(value) == (*PLAN_KEYS, "reason", "levers")
    assert value.pop("levers") == {"tp=8": 2.0}
    assert value.pop("reason") == "12 GiB too much"
    assert set(value.values()) == {None}


def test_no_number_breaks_the_json() -> None:
    value = {"gap": float("inf"), "loss": [float("nan"), 1.5]}
    assert json_text(value).endswith("}\n")
    assert printed(value) == {"gap": None, "loss": [None, 1.5]}


def test_every_key_is_documented(result: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
    value = plan_object(result)
    keys = [*value, *(f"memory[].{key}" for key in value["memory"][0])]
    keys += [f"search.{key}" for key in value["search"]]
    keys.remove("search")
    assert [key for key in keys if f"| `{key}` |" not in page] == []
