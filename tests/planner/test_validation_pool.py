"""Many runs at once are predicted as one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from claw_plan.planner.validation import predict_rows
from claw_plan.planner.validation_pool import LONGEST_CHUNK, chunks_of, predict_all
from claw_plan.profiles.hardware_text import hardware_of
from claw_plan.profiles.trainers import load_trainers
from claw_plan.profiles.training_row import Dimensions, PublishedPlan, TrainingRow

SIZES = Dimensions(
    layers=2,
    hidden=64,
    heads=2,
    kv_heads=2,
    head_dim=32,
    ffn=256,
    vocab=128,
    seq_len=32,
)
PLAN = PublishedPlan(
    dp=2,
    tp=1,
    pp=1,
    cp=1,
    ep=1,
    etp=1,
    vpp=1,
    micro_batch=1,
    global_batch=8,
    sharding="zero3",
)


def run(name: str, **changes: object) -> TrainingRow:
    hardware = hardware_of("A100-80GB", 2, 8)
    row = TrainingRow(
        id=name,
        family="somebody",
        group="g",
        trainer="torch",
        trust="A",
        complete=True,
        model_name="tiny",
        dimensions=SIZES,
        cluster=hardware.cluster,
        device_name=hardware.device_name,
        plan=PLAN,
        step_time_ns=1_000_000,
    )
    return replace(row, **changes)  # type: ignore[arg-type]


def test_runs_of_one_model_stay_together() -> None:
    other = replace(SIZES, hidden=128, heads=4)
    rows = [run(str(n), dimensions=SIZES if n % 2 else other) for n in range(2 * LONGEST_CHUNK)]
    chunks = chunks_of([*rows, run("last", trainer="maxtext")])
    assert [len(chunk) for chunk in chunks] == [LONGEST_CHUNK, LONGEST_CHUNK, 1]
    assert all(len({row.dimensions for row in chunk}) == 1 for chunk in chunks)


def test_a_few_runs_are_predicted_here() -> None:
    told: list[float] = []
    rows = [run("a"), run("b", plan=replace(PLAN, micro_batch=2))]
    trainers = load_trainers()
    found = predict_all(rows, trainers, lambda _, fraction: told.append(fraction))
    expected = {one.row_id: one for one in predict_rows(rows, trainers)}
    assert found == expected
    assert found["a"].step_time_ns
    assert told == [0.5, 1.0]


@pytest.mark.slow
def test_processes_predict_the_same() -> None:
    rows = [run(str(n), plan=replace(PLAN, global_batch=2 * (n + 1))) for n in range(14)]
    trainers = load_trainers()
    told: list[float] = []
    found = predict_all(rows, trainers, lambda _, fraction: told.append(fraction), processes=2)
    assert found == {one.row_id: one for one in predict_rows(rows, trainers)}
    assert told[-1] == 1.0
