"""Rows to predictions, and reasons where there are none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from claw_plan.planner.published_run import pose
from claw_plan.planner.validation import cost_without_launches, predict_rows, predict_step
from claw_plan.profiles.hardware_text import hardware_of
from claw_plan.profiles.trainer import NEUTRAL, Trainer
from claw_plan.profiles.training_row import Dimensions, PublishedPlan, TrainingRow

SLOW = Trainer(name="slow", host_ns=10_000_000.0)
TRAINERS = {"torch": replace(NEUTRAL, name="torch"), "slow": SLOW}
HARDWARE = hardware_of("A100-80GB", 2, 8)
ROW = TrainingRow(
    id="run", family="f", group="g", trainer="torch", trust="A", complete=True, model_name="tiny",
    dimensions=Dimensions(
        layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=256, vocab=512, seq_len=32
    ),
    cluster=HARDWARE.cluster, device_name=HARDWARE.device_name,
    plan=PublishedPlan(
        dp=2, tp=1, pp=1, cp=1, ep=1, etp=1, vpp=1, micro_batch=1, global_batch=8,
        sharding="zero3",
    ),
    step_time_ns=None,
)  # fmt: skip


def test_a_prediction_is_the_step_and_its_parts():
    (found,) = predict_rows([ROW], TRAINERS)
    expected = predict_step(pose(ROW, TRAINERS["torch"], cost_without_launches))
    assert (found.row_id, found.step_time_ns) == ("run", round(expected.ns))
    assert sum(found.parts_ns.values()) == pytest.approx(expected.ns, rel=1e-6)
    assert found.memory_bytes and not found.not_expressed


def test_a_row_is_predicted_under_its_trainer_or_the_default():
    names = ("torch", "slow", "never heard of")
    found = list(predict_rows([replace(ROW, trainer=name) for name in names], TRAINERS))
    default, slow, unknown = (each.step_time_ns for each in found)
    assert unknown == default < slow
    # Ten milliseconds for each kernel: nothing else is left of the time.
    assert found[1].parts_ns["host"] > 0.9 * slow


def test_what_cannot_be_expressed_is_told_and_the_next_predicted():
    wide = replace(ROW, id="wide", plan=replace(ROW.plan, dp=4))
    found = list(predict_rows([wide, ROW], TRAINERS))
    assert found[0].step_time_ns is None
    assert found[0].not_expressed == "the plan uses 4 devices, the cluster has 2"
    assert found[1].step_time_ns


def test_the_interval_widens_with_what_is_not_known():
    def width(row: TrainingRow) -> float:
        (found,) = predict_rows([row], TRAINERS)
        assert found.step_time_ns and found.low_ns and found.high_ns
        return (found.high_ns - found.low_ns) / 2 / found.step_time_ns

    widths = [
        width(ROW),
        width(replace(ROW, complete=False)),
        width(replace(ROW, trainer="nobody's")),
    ]
    assert widths == pytest.approx([0.13, 0.22, 0.30], rel=1e-3)
