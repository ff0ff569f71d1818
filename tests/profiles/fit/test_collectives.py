from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from claw_plan.profiles.collective_constants import TABLE
from claw_plan.profiles.fit.collectives import (
    FITTER,
    Model,
    fit,
    fit_collectives,
    left_out_errors,
    timing_of,
)
from claw_plan.profiles.fit.registry import DataFile
from claw_plan.profiles.published_collectives import read_collectives

SIZES = [1 << power for power in range(12, 33, 4)]


def data_file(latency_us: float = 30.0, gb_per_s: float = 330.0) -> DataFile:
    """All-gathers and all-reduces of eight H100 at a bus bandwidth, after a latency."""
    rows: list[dict[str, Any]] = []
    for op, factor in (("all_gather", 7 / 8), ("all_reduce", 14 / 8)):
        for size in SIZES:
            time_us = latency_us + size * factor / gb_per_s / 1e3
            rows.append({"collective": op, "gpu": "H100-80GB", "ranks": 8, "gpus_per_node": 8,
                         "nodes": 1, "intra": "NVLink", "bytes": size, "time_us": time_us,
                         "note": "NVLS off", "source": "a page"})  # fmt: skip
    return DataFile(path=Path("some.yaml"), data={"nccl_tests": rows}, sha256="ab" * 32)


def test_the_same_data_gives_the_same_file() -> None:
    made = fit_collectives([data_file()])
    assert made == fit_collectives([data_file()])
    text = yaml.safe_load(made["collectives.yaml"])
    assert text["from"] == ["some.yaml (sha256 abababababababab)"]
    assert text["rows"] == 2 * len(SIZES)
    assert set(text["left_out"]) == {"from_1_mib", "below_1_mib", "families"}
    assert set(text["left_out"]["families"]) == {
        "all_gather h100-sxm-80gb",
        "all_reduce h100-sxm-80gb",
    }


def test_constants_follow_the_measurements() -> None:
    slow = yaml.safe_load(fit_collectives([data_file(60.0, 200.0)])["collectives.yaml"])
    fast = yaml.safe_load(fit_collectives([data_file(20.0, 400.0)])["collectives.yaml"])
    of = "nvswitch4"
    assert slow["links"][of]["share"]["other"] < fast["links"][of]["share"]["other"]
    assert slow["links"][of]["launch_ns"] > fast["links"][of]["launch_ns"]


def test_a_group_left_out_is_predicted_by_the_others() -> None:
    file = data_file()
    rows = read_collectives(file.path, file.data).collectives
    timings = [timing_of(row) for row in rows]
    model = Model(timings)
    every = np.ones(len(timings), dtype=bool)
    measured = np.array([timing.measured_ns for timing in timings])
    in_sample = model.times_ns(fit(model, timings, every)) / measured - 1
    left_out = left_out_errors(model, timings)
    assert np.abs(in_sample).mean() < np.abs(left_out).mean() < 0.25


def test_only_collective_files_are_recognised() -> None:
    assert FITTER.recognises(data_file())
    other = DataFile(path=Path("x.yaml"), data={"xla_matmul_table": {"rows": []}}, sha256="")
    assert not FITTER.recognises(other)


def test_the_committed_table_states_its_error() -> None:
    left_out = yaml.safe_load(TABLE.read_text())["left_out"]
    assert left_out["from_1_mib"]["rows"] > 1000
    assert left_out["from_1_mib"]["mape"] == pytest.approx(10, abs=3)
    assert left_out["below_1_mib"]["mape"] < 30
