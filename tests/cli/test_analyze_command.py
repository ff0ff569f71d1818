"""`analyze` on a small model, for people and for scripts."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from claw_plan.cli.main import cli

SMALL = Path(__file__).parents[2] / "examples" / "gpt_small.py"


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, ["analyze", str(SMALL), "--seq-len", "64", *args])


def test_stages_and_their_balance() -> None:
    result = run("--pp", "2")
    words = " ".join(result.stdout.split())
    assert result.exit_code == 0
    assert "pp=2, tp=1, microbatch 1" in words and "0: prologue to" in words
    assert "by operations: the largest stage is" in words


def test_json_with_a_cluster() -> None:
    value = json.loads(run("--pp", "2", "--cluster", "dgx-a100-80gb", "--json").stdout)
    assert [stage["stage"] for stage in value["stages"]] == [0, 1]
    assert all(stage["time_ns"] > 0 and stage["peak_bytes"] > 0 for stage in value["stages"])
    assert value["imbalance"] >= 0


def test_what_cannot_be_cut_is_one_line() -> None:
    result = run("--pp", "99")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("claw-plan: pp=99")
