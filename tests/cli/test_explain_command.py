"""`explain` with a planner that answers at once; the real one is in tests/planner."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from claw_plan.cli.main import cli
from claw_plan.planner import explanation
from claw_plan.planner.binding import Binding
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.explanation import Against, Explanation
from claw_plan.planner.neighbours import Neighbour
from claw_plan.planner.what_if import AS_IT_IS, WhatIf
from claw_plan.profiles.units import GIB, NS_PER_MS


@pytest.fixture
def asked(result: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    best, wide = result.best, Candidate(tp=8)
    found = Explanation(
        name="plan.yaml",
        scored=best,
        binding=Binding(
            parts_ns={"compute": 36 * NS_PER_MS, "dp": 4 * NS_PER_MS},
            binds="compute",
            link="dp over ib-hdr",
            fullest=0.95,
            stage=1,
        ),
        neighbours=(
            Neighbour(knob="tp", value=8, candidate=wide, step_time_ns=60 * NS_PER_MS),
            Neighbour(
                knob="recompute",
                value="none",
                candidate=wide,
                step_time_ns=38 * NS_PER_MS,
                missing_bytes=6 * GIB,
                stage=1,
            ),
            Neighbour(knob="pp", value=4, candidate=wide, refused="no such stages"),
        ),
        what_ifs=(
            WhatIf(change=AS_IT_IS, candidate=wide, step_time_ns=40 * NS_PER_MS, gap=0.0),
            WhatIf(change="one more node", candidate=wide, step_time_ns=32 * NS_PER_MS, gap=0.1),
        ),
        against=Against(
            name="other.yaml",
            scored=replace(best, step_time_ns=50 * NS_PER_MS),
            parts_ns={"compute": 12 * NS_PER_MS, "dp": -2 * NS_PER_MS},
        ),
    )
    kept: dict[str, Any] = {}

    def explain(path: Path, **settings: Any) -> Explanation:
        kept.update(settings, path=path)
        return found

    monkeypatch.setattr(explanation, "explain", explain)
    return kept


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, ["explain", "plan.yaml", *args])


def test_the_report_says_what_binds_and_what_would_help(asked: dict[str, Any]) -> None:
    result = run("--against", "other.yaml")
    words = " ".join(result.stdout.split())
    assert result.exit_code == 0
    for said in (
        "compute binds; of the traffic, dp over ib-hdr counts most; stage 1 fills 95 %",
        "tp=8 60.0 ms +50 % fits",
        "recompute=none 38.0 ms -5.0 % 6.0 GiB short on stage 1",
        "pp=4 - - no such stages",
        "one more node 32.0 ms +25 %",
        "compute +12.0 ms dp -2.00 ms together +10.0 ms",
    ):
        assert said in words, said


def test_flags_reach_the_planner(asked: dict[str, Any]) -> None:
    run("--no-replan", "--time-limit", "5", "--memory-headroom", "0.2", "--profile", "p")
    assert asked["path"] == Path("plan.yaml") and asked["against"] is None
    assert (asked["replan"], asked["time_limit_s"]) == (False, 5.0)
    assert (asked["memory_headroom"], asked["profile"]) == (0.2, Path("p"))


def test_json_has_the_same(asked: dict[str, Any]) -> None:
    value = json.loads(run("--json").stdout)
    assert value["binds"] == "compute" and value["critical_path_ms"] == {"compute": 36, "dp": 4}
    assert value["neighbours"][1]["missing_gib"] == 6.0
    assert value["neighbours"][2]["refused"] == "no such stages"
    assert value["what_ifs"][1]["gap"] == 0.1
    assert sum(value["against"]["difference_ms"].values()) == 10.0


def test_every_key_is_documented(asked: dict[str, Any]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
    own = ("critical_path_ms", "binds", "link", "fullest_stage", "neighbours", "what_ifs")
    assert [key for key in (*own, "against") if f"| `{key}` |" not in page] == []
