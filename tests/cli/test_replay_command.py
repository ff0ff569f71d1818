"""`claw-plan replay` from end to end on traces written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from claw_plan.cli.main import cli
from claw_plan.profiles.profile import load_profile

MS = 1000.0
"""Of the trace's microseconds."""


def call(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, ["replay", *map(str, args)])


def event(category: str, name: str, start: float, duration: float, **args: Any) -> Any:
    tid = args.pop("tid", 1)
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid,
            "ts": start * MS, "dur": duration * MS, "args": args}  # fmt: skip


def trace(path: Path, rank: int, product_ms: float) -> Path:
    """A step of a product, an all-reduce of 4 MB that ends at 60 ms, and 10 ms more."""
    mm = {"Input Dims": [[64, 32], [32, 16]], "Input type": ["float", "float"]}
    events = [
        event("user_annotation", "ProfilerStep#5", 0, 70),
        event("cpu_op", "aten::mm", 0, product_ms, **mm),
        event("user_annotation", "gloo:all_reduce", product_ms, 60 - product_ms, tid=2,
              **{"Input Dims": [[1 << 20]], "Input type": ["float"]}),
        event("cpu_op", "aten::gelu", 60, 10),
    ]  # fmt: skip
    info = {"rank": rank, "world_size": 2, "backend": "gloo"}
    path.write_text(json.dumps({"distributedInfo": info, "traceEvents": events}))
    return path


@pytest.fixture
def traces(tmp_path: Path) -> list[Path]:
    return [trace(tmp_path / "a.json", 0, 20), trace(tmp_path / "b.json", 1, 40)]


def test_json_has_the_promised_keys(traces: list[Path]) -> None:
    result = call(*traces, "--json")
    assert result.exit_code == 0
    value = json.loads(result.stdout)
    assert list(value) == [
        "ranks", "steps", "step_time_ms", "step_time_range_ms", "parts_ms", "collectives",
        "stragglers", "warnings",
    ]  # fmt: skip
    assert value["ranks"] == [0, 1]
    assert value["step_time_ms"] == 70.0
    assert [(step["step"], step["time_ms"]) for step in value["steps"]] == [(5, 70.0)]
    assert value["parts_ms"] == {
        "gemm": 30.0, "memory": 10.0, "waiting": 10.0, "transfer_exposed": 20.0, "idle": 0.0,
    }  # fmt: skip
    (reduce,) = value["collectives"]
    assert {key: reduce[key] for key in ("step", "op", "bytes", "count", "group_size")} == {
        "step": 5, "op": "all_reduce", "bytes": 1 << 22, "count": 1, "group_size": 2,
    }  # fmt: skip
    assert (reduce["transfer_ms"], reduce["waiting_ms"]) == (20.0, 10.0)
    (straggler,) = value["stragglers"]
    assert (straggler["rank"], straggler["cause"]) == (1, "compute")


def test_other_hardware_is_simulated(traces: list[Path]) -> None:
    value = json.loads(call(*traces, "--scale", "link=2x,compute=0.5x", "--json").stdout)
    assert value["resimulated"] == {
        "step_time_ms": 110.0,  # 80 + 10 + 20
        "unchanged_ms": 70.0,
        "recorded_ms": 70.0,
    }
    more = json.loads(call(*traces, "--ranks", "4", "--json").stdout)
    # Half of the bytes per hop become three quarters: 20 ms to 30 ms.
    assert more["resimulated"]["step_time_ms"] == 80.0


def test_people_read_where_the_time_went(traces: list[Path]) -> None:
    result = call(*traces, "--scale", "link=2x")
    assert result.exit_code == 0
    for words in ("ranks 2 of 2", "waiting", "rank 1: the others wait", "Critical path", "-14"):
        assert words in result.stdout


def test_what_was_measured_goes_into_a_profile(traces: list[Path], tmp_path: Path) -> None:
    profile = tmp_path / "p.profile"
    result = call(*traces, "--profile", profile)
    assert result.exit_code == 0 and "added 2 measurements on cpu-core" in result.stderr
    by_device = {m.device: m for m in load_profile(profile).measurements}
    assert sorted(by_device["cpu-core"].samples_ns) == [20_000_000, 40_000_000]
    reduce = by_device["cpu-core/loopback"]
    assert (reduce.work.bytes, reduce.samples_ns) == (1 << 22, (20_000_000,))


def test_the_step_can_be_looked_at(traces: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert call(*traces, "--trace", out).exit_code == 0
    names = {one["name"] for one in json.loads(out.read_text())["traceEvents"]}
    assert {"aten::mm", "all_reduce"} <= names


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--scale", "links=2x"], "'links=2x' is not a part"),
        (["--scale", "link=0x"], "'link=0x' is not a part"),
        (["--scale", "link=1.2.3x"], "is not a part"),
        (["--scale", "link=2x", "--scale", "link=3x"], "link is scaled twice"),
        (["--cluster", "cpu-nonsense"], "cpu-nonsense"),
        (["--rank", "3"], "--rank is given 1 times"),
    ],
)
def test_wrong_options_are_one_line(traces: list[Path], options: list[str], said: str) -> None:
    result = call(*traces, *options)
    assert result.exit_code == 2 and result.stdout == ""
    assert said in result.stderr and result.stderr.count("\n") == 1


def test_a_damaged_trace_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "cut.json"
    path.write_text('{"traceEvents": [{"ph": "X", "na')
    result = call(path, "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "cut.json is truncated at byte 32" in result.stderr
