"""Files of published runs: sound rows, rows that cannot be repeated, and broken ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.published_fields import load_yaml
from claw_plan.profiles.published_rows import Published
from claw_plan.profiles.published_training import is_training, read_training

DATA = Path(__file__).parents[3] / "shared" / "data" / "training.yaml"

Rows = Callable[..., dict[str, Any]]
Write = Callable[..., Path]


def read(path: Path) -> Published:
    return read_training(path, load_yaml(path))


def test_a_sound_row(row: Rows, write_rows: Write) -> None:
    (one,) = read(write_rows([row()])).training
    assert (one.id, one.trainer, one.device_name) == ("run-1", "torch", "h100-sxm-80gb")
    assert one.step_time_ns == 1_500_000_000
    assert one.cluster.num_devices == 16
    assert one.plan.num_microbatches == 2
    assert one.complete and one.assumed == () and one.optimizer == "adamw"


def test_flags_and_missing_things_are_carried(row: Rows, write_rows: Write) -> None:
    values = row(
        flags=["implied_mfu_below_10pct"],
        completeness="needs_recompute_or_sharding",
        plan={"recompute": None},
        hardware={"inter": None},
    )
    (one,) = read(write_rows([values])).training
    assert one.flags == ("implied_mfu_below_10pct",)
    assert not one.complete
    assert one.assumed == (
        "network not printed: 50 GB/s per GPU",
        "recompute not printed: none",
    )


def test_completeness_without_the_key(row: Rows, write_rows: Write) -> None:
    with_gap = row(id="gap", completeness=None, missing=["plan.recompute"])
    without = row(id="none", completeness=None, missing=["hardware.inter"])
    rows = read(write_rows([with_gap, without])).training
    assert [one.complete for one in rows] == [False, True]


def test_forward_and_backward_alone_have_no_optimizer(row: Rows, write_rows: Write) -> None:
    (one,) = read(write_rows([row(family="neusight")])).training
    assert one.optimizer == ""


def test_parts_of_memory_are_rows_of_their_own(row: Rows, write_rows: Write) -> None:
    figures = {"memory_activations_gib": 2.0, "memory_params_optimizer_gib": 1.0}
    rows = read(write_rows([row(measured=figures)])).training
    assert [(one.id, one.memory_kind) for one in rows] == [
        ("run-1", "activations"),
        ("run-1:states", "states"),
    ]
    assert [one.step_time_ns is None for one in rows] == [False, True]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hardware": {"gpu": "Gaudi 3"}}, "no figures for the GPU 'Gaudi 3'"),
        ({"plan": {"tp": 2}}, "dp * tp * pp * cp is 32, not the 16 GPUs"),
        ({"plan": {"micro_batch": 3}}, "is no multiple of dp * micro-batch 16 * 3"),
        ({"plan": {"ep": 4}}, "expert parallelism of 4 without experts"),
        ({"measured": {"step_time_s": None, "failed": True}}, "did not finish"),
        ({"measured": {"step_time_s": None, "note": "?"}}, "no time, rate or memory"),
    ],
)
def test_rows_that_cannot_be_repeated_are_listed(
    row: Rows, write_rows: Write, changes: dict[str, Any], reason: str
) -> None:
    published = read(write_rows([row(id="good"), row(**changes)]))
    assert [one.id for one in published.training] == ["good"]
    (other,) = published.not_expressed
    assert (other.id, other.family) == ("run-1", "somebody")
    assert reason in other.reason


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"model": {"hidden": None}}], r"runs\.yaml:1: row 'run-1': model\.hidden is missing"),
        ([{"plan": {"dp": "all"}}], r"plan\.dp must be a whole number"),
        ([{"measured": {"step_time_s": -1}}], r"measured\.step_time_s must be a positive number"),
        ([{"hardware": None}], r"hardware is missing"),
        ([{"model": "a llama"}], r"model must hold keys and values; got 'a llama'"),
    ],
)
def test_broken_rows_are_errors(
    row: Rows, write_rows: Write, rows: list[dict[str, Any]], message: str
) -> None:
    path = write_rows([row(**changes) for changes in rows])
    with pytest.raises(InputError, match=message):
        read(path)


def test_the_line_of_a_broken_row_is_named(row: Rows, write_rows: Write) -> None:
    path = write_rows([row(id="good"), row(model={"layers": 0})])
    line = path.read_text(encoding="utf-8").splitlines().index("- id: run-1") + 1
    (other,) = read(path).not_expressed
    assert other.reason.startswith(f"runs.yaml:{line}: row 'run-1'")


def test_a_broken_row_does_not_cost_the_others(row: Rows, write_rows: Write) -> None:
    published = read(write_rows([row(hardware=None), row(id="good"), row(id="good")]))
    assert [one.id for one in published.training] == ["good"]
    missing, twice = published.not_expressed
    assert (missing.id, missing.family) == ("run-1", "somebody")
    assert missing.reason.endswith("hardware is missing")
    assert twice.reason.endswith("row 'good': id stands twice in the file")


def test_recognition(row: Rows) -> None:
    assert is_training([row()])
    assert is_training(["a heading", row()])
    assert is_training({"rows": [row()]})
    assert not is_training([])
    assert not is_training({"nccl_tests": [{"bytes": 8}]})
    assert not is_training([{"id": 1}])


@pytest.mark.skipif(not DATA.exists(), reason="the shared tables are not beside this checkout")
def test_all_published_rows_are_read() -> None:
    published = read(DATA)
    whole = [one for one in published.training if ":" not in one.id]
    assert len(whole) + len(published.not_expressed) == 726
    assert {one.reason for one in published.not_expressed} == {
        "the trial did not finish, cause not printed"
    }
    complete = [one for one in whole if one.complete and one.trust in "AB" and one.step_time_ns]
    # 426 with a time of their own, the 530B run of Korthikanti by its utilisation, three runs of
    # the Megatron ModelZoo by their FLOP rate.
    assert len(complete) == 430
