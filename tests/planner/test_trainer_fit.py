"""Constants are found back from runs that were made with them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from claw_plan.planner.trainer_fit import (
    Composed,
    Costs,
    Simulated,
    composed,
    constants_of,
    fit,
    prior_of,
    simulate_row,
    trainer_under,
)
from claw_plan.profiles.hardware_text import hardware_of
from claw_plan.profiles.trainers import load_trainers
from claw_plan.profiles.training_row import Dimensions, PublishedPlan, TrainingRow

TRAINERS = load_trainers(with_fitted=False)
HARDWARE = hardware_of("A100-80GB", 8, 8)
DEVICE = HARDWARE.device_name
WIDE = Dimensions(
    layers=4, hidden=8192, heads=64, kv_heads=64, head_dim=128, ffn=32768, vocab=50304,
    seq_len=2048,
)  # fmt: skip
NARROW = replace(WIDE, layers=24, hidden=1024, heads=16, kv_heads=16, head_dim=64, ffn=4096)
HALF = replace(WIDE, hidden=4096, heads=32, kv_heads=32, ffn=16384)
LONG = replace(WIDE, hidden=2048, heads=16, kv_heads=16, ffn=8192, seq_len=16384)
PLAN = PublishedPlan(
    dp=8, tp=1, pp=1, cp=1, ep=1, etp=1, vpp=1, micro_batch=2, global_batch=64, sharding="zero3"
)
DIVIDED = replace(PLAN, dp=1, tp=8, global_batch=8)


def row(name: str, dims: Dimensions, plan: PublishedPlan) -> TrainingRow:
    return TrainingRow(
        id=name, family="f", group=name, trainer="torch", trust="A", complete=True,
        model_name=name, dimensions=dims, cluster=HARDWARE.cluster, device_name=DEVICE, plan=plan,
        step_time_ns=10**9,
    )  # fmt: skip


ROWS = (
    row("wide", WIDE, PLAN),
    row("narrow", NARROW, replace(PLAN, micro_batch=8)),
    row("launches", replace(NARROW, seq_len=128), replace(PLAN, dp=1, global_batch=2)),
    row("long", LONG, replace(PLAN, micro_batch=1)),
    row("divided", WIDE, DIVIDED),
    row("divided narrower", HALF, DIVIDED),
)
NAMES = constants_of(TRAINERS, ROWS)
TRUTH = {
    ("rate", DEVICE, "half"): 0.85,
    ("trainer", "torch", "memory_scale"): 1.3,
    ("trainer", "torch", "tp_scale"): 0.8,
}
"""What the runs were made with, as factors on where the fit begins."""


def under(factors: Mapping[tuple[str, str, str], float]) -> dict[tuple[str, str, str], float]:
    return {name: value * factors.get(name, 1.0) for name, value in NAMES.items()}


def simulated(rows: Sequence[TrainingRow], values) -> list[Simulated]:
    costs = Costs(values)
    return [simulate_row(one, TRAINERS[one.trainer], costs) for one in rows]


@cache
def measured() -> tuple[TrainingRow, ...]:
    """The rows as they would be measured under TRUTH."""
    return tuple(
        replace(one, step_time_ns=round(one.step_time_ns * math.exp(found.error)))
        for one, found in zip(ROWS, simulated(ROWS, under(TRUTH)), strict=True)
    )


def runs_at(rows: Sequence[TrainingRow], values, weight: float = 1.0) -> Composed:
    prior = prior_of(NAMES, TRAINERS)
    found = simulated(rows, values)
    return composed(values, prior, TRAINERS, found, [weight] * len(rows))


def test_a_run_under_its_own_constants_has_no_error():
    found = simulated(measured(), under(TRUTH))
    assert [one.error for one in found] == pytest.approx([0.0] * len(ROWS), abs=1e-8)
    assert [sum(one.shares.values()) for one in found] == pytest.approx([1.0] * len(ROWS))


@pytest.mark.slow
def test_known_constants_are_found_back():
    """With weights so large that where they were drawn to is no matter."""
    rows = measured()
    values, runs = fit(rows, [1e6] * len(rows), TRAINERS, lambda asked: simulated(rows, asked[0]))
    assert np.abs(runs.errors).max() < 0.005
    for name, factor in TRUTH.items():
        assert values[name] / NAMES[name] == pytest.approx(factor, rel=0.05), name


@pytest.mark.parametrize(
    "name",
    [
        ("rate", DEVICE, "half"),
        ("rate", DEVICE, "attention"),
        ("trainer", "torch", "memory_scale"),
        ("trainer", "torch", "tp_scale"),
        ("trainer", "torch", "host_ns"),
    ],
)
def test_errors_at_other_constants_are_those_of_a_simulation(name):
    """Two percent more of one: the change is right to a tenth of itself."""
    now = runs_at(ROWS, NAMES)
    later = [one.error for one in simulated(ROWS, under({name: 1.02}))]
    changes = np.array(later) - now.errors
    logs = now.start.copy()
    logs[now.names.index(name)] += math.log(1.02)
    expected = now.errors_at(logs) - now.errors
    assert np.abs(changes).max() > 1e-3
    assert expected == pytest.approx(changes, rel=0.1, abs=2e-4)


def test_left_out_rows_are_no_matter():
    runs = runs_at(measured(), NAMES)
    keep = np.array([True, True, True, False, True, False])
    wild = replace(runs, errors=np.where(keep, runs.errors, 3.0))
    assert wild.solve(keep) == pytest.approx(runs.solve(keep), abs=1e-12)
    assert np.abs(wild.solve() - runs.solve()).max() > 0.05


def test_without_runs_constants_stay_where_they_are_drawn():
    runs = runs_at(measured(), NAMES)
    nothing = np.zeros(len(ROWS), bool)
    assert runs.solve(nothing) == pytest.approx(runs.start, abs=1e-6)


def test_a_trainer_takes_what_it_has_none_of_from_its_parents():
    values = {**NAMES, ("trainer", "torch", "dp_scale"): 9.0, ("shared", "", "ep_scale"): 0.1}
    under_values = trainer_under(values, TRAINERS["megatron-core"])
    assert (under_values.dp_scale, under_values.ep_scale) == (9.0, 0.1)
    own = {**values, ("trainer", "megatron-core", "dp_scale"): 2.0}
    assert trainer_under(own, TRAINERS["megatron-core"]).dp_scale == 2.0
    assert trainer_under(own, TRAINERS["torch"]).dp_scale == 9.0
