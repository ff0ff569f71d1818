"""Scores of published rows; errors counted by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from claw_plan.cli.json_output import json_text
from claw_plan.cli.validation_scores import (
    Scores,
    families,
    joined,
    score_file,
    validation_object,
)
from claw_plan.planner.validation import Prediction
from claw_plan.profiles.hardware_text import hardware_of
from claw_plan.profiles.published_rows import (
    COLLECTIVES,
    TRAINING,
    CollectiveRow,
    NotExpressed,
    Published,
)
from claw_plan.profiles.training_row import Dimensions, PublishedPlan, TrainingRow
from claw_plan.profiles.units import GIB
from claw_plan.profiles.work import CollectiveWork

HARDWARE = hardware_of("A100-80GB", 8, 8)
ROW = TrainingRow(
    id="a",
    family="somebody",
    group="g",
    trainer="torch",
    trust="A",
    complete=True,
    model_name="tiny",
    dimensions=Dimensions(
        layers=2,
        hidden=64,
        heads=2,
        kv_heads=2,
        head_dim=32,
        ffn=256,
        vocab=128,
        seq_len=32,
    ),
    cluster=HARDWARE.cluster,
    device_name=HARDWARE.device_name,
    plan=PublishedPlan(
        dp=8,
        tp=1,
        pp=1,
        cp=1,
        ep=1,
        etp=1,
        vpp=1,
        micro_batch=1,
        global_batch=8,
        sharding="zero3",
    ),
    step_time_ns=1_000_000_000,
)
TENSOR_PARALLEL = replace(ROW.plan, dp=1, tp=8)

ROW_KEYS = {
    *("id", "quantity", "unit", "predicted", "measured", "error_pct", "family", "assumed"),
}
STATISTICS = {
    *("n", "mape", "median", "p90", "bias", "pairs", "pairs_right_pct", "regret_pct"),
}


def predicted(row: TrainingRow, seconds: float, **others: object) -> Prediction:
    return Prediction(row_id=row.id, step_time_ns=round(seconds * 1e9), **others)  # type: ignore[arg-type]


@pytest.fixture
def scores() -> Scores:
    slow = replace(ROW, id="b", plan=TENSOR_PARALLEL, step_time_ns=2_000_000_000)
    guessed = replace(ROW, id="c", complete=False, assumed=("recompute not printed: none",))
    doubtful = replace(ROW, id="d", trust="C", family="other", flags=("odd",))
    refused = replace(ROW, id="e")
    memory = replace(
        ROW, id="f", step_time_ns=None, memory_bytes=10 * GIB, memory_kind="allocated"
    )
    ran_out = replace(ROW, id="g", step_time_ns=None, out_of_memory=True)
    predictions = [
        predicted(ROW, 1.1),
        predicted(slow, 1.0),
        predicted(guessed, 1.5, low_ns=10**9, high_ns=2 * 10**9),
        predicted(doubtful, 3.0),
        Prediction(row_id="e", not_expressed="no such thing"),
        predicted(memory, 1.0, memory_bytes=9 * GIB),
        predicted(ran_out, 1.0, memory_bytes=90 * GIB, needed_bytes=90 * GIB),
    ]
    file = Published(
        path=Path("runs.yaml"),
        kind=TRAINING,
        training=(ROW, slow, guessed, doubtful, refused, memory, ran_out),
        not_expressed=(NotExpressed(id="h", family="other", reason="no such thing"),),
    )
    return score_file(file, {one.row_id: one for one in predictions})


def test_the_object_has_the_keys_of_its_description(scores: Scores) -> None:
    found = json.loads(json_text(validation_object(scores)))
    assert all(set(row) >= ROW_KEYS for row in found["rows"])
    summary = found["summary"]
    assert set(summary) == {
        *("overall", "assumed", "memory", "not_expressed"),
        *("somebody", "other"),
    }
    assert all(set(summary[key]) >= STATISTICS for key in summary if key != "not_expressed")
    assert summary["not_expressed"] == {"count": 2, "reasons": {"no such thing": 2}}
    assert [one["id"] for one in found["not_expressed"]] == ["h", "e"]
    assert found["flagged"] == [{"id": "d", "family": "other", "flags": ["odd"]}]


def test_rows_by_hand(scores: Scores) -> None:
    rows = {row["id"]: row for row in validation_object(scores)["rows"]}
    assert list(rows) == ["a", "b", "c", "d", "f"]
    assert rows["a"]["predicted"] == pytest.approx(1100)
    assert (rows["a"]["measured"], rows["a"]["unit"]) == (1000, "ms")
    assert rows["a"]["error_pct"] == pytest.approx(10)
    assert rows["c"]["assumed"] == ["recompute not printed: none"]
    assert rows["c"]["interval"] == [1000, 2000]
    assert rows["d"]["flags"] == ["odd"]
    assert (rows["f"]["quantity"], rows["f"]["unit"]) == ("memory", "GiB")


def test_what_counts_where(scores: Scores) -> None:
    summary = validation_object(scores)["summary"]
    assert summary["overall"]["n"] == 2  # a and b: complete, trusted
    assert summary["overall"]["mape"] == pytest.approx((10 + 50) / 2)
    assert summary["assumed"]["n"] == 1
    assert summary["somebody"]["n"] == 3
    assert summary["other"]["bias"] == pytest.approx(200)


def test_the_slower_plan_was_predicted_faster(scores: Scores) -> None:
    overall = validation_object(scores)["summary"]["overall"]
    assert (overall["pairs"], overall["pairs_right_pct"]) == (1, 0.0)
    assert overall["regret_pct"] == pytest.approx(100)


def test_memory_and_verdicts(scores: Scores) -> None:
    memory = validation_object(scores)["summary"]["memory"]
    assert memory["mape"] == pytest.approx(10)
    assert memory["too_low_pct"] == 100
    # The run that ran out of memory is told; those without a prediction of memory do not count.
    assert memory["verdicts"] == {"out_of_memory": 1, "told": 1, "ran": 0, "false_alarms": 0}


def test_several_files_are_counted_together(scores: Scores) -> None:
    both = joined([scores, scores])
    assert families(both)["somebody"].n == 2 * families(scores)["somebody"].n


def test_collectives_all_count() -> None:
    work = CollectiveWork(op="all_reduce", bytes=1 << 20, group_size=8, nodes=1)
    row = CollectiveRow(
        id="n[0]",
        family="all_reduce A100",
        group="g",
        cluster=HARDWARE.cluster,
        device_name=HARDWARE.device_name,
        work=work,
        measured_ns=50_000,
    )
    file = Published(path=Path("c.yaml"), kind=COLLECTIVES, collectives=(row,))
    found = validation_object(score_file(file, {}))
    assert found["rows"][0]["measured"] == 50
    assert found["rows"][0]["unit"] == "us"
    assert found["summary"]["overall"]["n"] == found["summary"]["all_reduce A100"]["n"] == 1
