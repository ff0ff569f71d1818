"""What rank 0 finds in the facts of all ranks; each fault is planted in one of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.job import Progress
from claw_plan.executor.preflight import (
    PREFLIGHT_FILE,
    Facts,
    facts_of,
    preflight,
    remarks,
    wrong,
)
from claw_plan.executor.ranks import Rank
from claw_plan.planner.plan import Plan, PlanPrediction, load_plan

GIB = 1 << 30

FACTS = [
    Facts(
        rank=rank,
        host=f"n{rank // 2 + 1}",
        versions={"torch": "2.13.0", "the model file": "abc"},
        device="CPU",
        device_free_bytes=0,
        host_free_bytes=8 * GIB,
        environment={},
    )
    for rank in range(4)
]


@pytest.fixture
def plan(tiny_plan: Callable[..., Path]) -> Plan:
    plan = load_plan(tiny_plan("preflight", dp_shard=4))
    mesh = plan.mesh.model_copy(update={"devices": ["0:0", "0:1", "1:0", "1:1"]})
    return plan.model_copy(update={"mesh": mesh})


def test_equal_ranks_on_the_planned_hosts_are_right(plan: Plan) -> None:
    assert wrong(plan, FACTS) == [] and remarks(plan, FACTS) == []


def test_other_versions_are_named_by_host(plan: Plan) -> None:
    other = replace(FACTS[2], versions={"torch": "2.12.1", "the model file": "missing"})
    [torch, model] = wrong(plan, [*FACTS[:2], other, FACTS[3]])
    assert torch == (
        "torch differs between the hosts: 2.13.0 on n1 and n2, 2.12.1 on n2; make it the same on "
        "all"
    )
    assert model.startswith("the model file differs between the hosts: abc on n1")


def test_variables_that_must_be_equal_are_named(plan: Plan) -> None:
    other = replace(FACTS[3], environment={"NCCL_ALGO": "Ring"})
    [text] = wrong(plan, [*FACTS[:3], other])
    assert text.startswith("NCCL_ALGO differs between the ranks: unset on n1 and n2, Ring on n2")


def test_a_host_too_small_to_build_the_model_is_named(plan: Plan) -> None:
    large = plan.model.model_copy(update={"parameters": 2 * 10**9})
    [first, second] = wrong(plan.model_copy(update={"model": large}), FACTS)
    assert first.startswith("n1 has 8.0 GiB of memory free, but its 2 ranks need 14.9 GiB")
    assert second.startswith("n2 has")


def test_a_device_that_somebody_else_uses_is_named(plan: Plan) -> None:
    prediction = PlanPrediction(
        step_time_ms=1,
        interval_ms=(1, 1),
        samples_per_s=1,
        tokens_per_s=None,
        mfu=None,
        memory_gib=[70.0],
        profile="",
        search={},
    )
    facts = [replace(f, device="NVIDIA H200", device_free_bytes=100 * GIB) for f in FACTS]
    facts[3] = replace(facts[3], device_free_bytes=60 * GIB)
    [text] = wrong(plan.model_copy(update={"prediction": prediction}), facts)
    assert text.startswith("rank 3 on n2 has 60.0 GiB free on its NVIDIA H200, but the plan needs")


def test_other_devices_and_hosts_than_planned_are_said(plan: Plan) -> None:
    facts = [replace(FACTS[0], device="NVIDIA H200"), *FACTS[1:]]
    assert remarks(plan, facts) == [
        "the plan is for cpu-core, but the ranks have h200-sxm-141gb: its predictions do not hold",
        "the ranks have different devices: NVIDIA H200 (rank 0), CPU (ranks 1, 2, 3); the slowest "
        "sets the pace",
    ]


def test_a_rank_alone_leaves_what_it_found(plan: Plan, alone: Rank, tmp_path: Path) -> None:
    own = plan.model_copy(update={"mesh": plan.mesh.model_copy(update={"devices": ["0:0"]})})
    progress = Progress()
    preflight(own, alone, progress, tmp_path)
    found = json.loads((tmp_path / PREFLIGHT_FILE).read_text())
    assert found["notes"] == [] and found["ranks"][0]["versions"]["claw-plan"]
    assert facts_of(alone, tmp_path / "none.py").versions["the model file"] == "missing"
    enormous = own.model.model_copy(update={"parameters": 10**15})
    with pytest.raises(ExecutionError, match="to build the model"):
        preflight(own.model_copy(update={"model": enormous}), alone, progress, tmp_path)
