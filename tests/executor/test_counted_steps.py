"""Which steps of real runs stand for their plan, as steps.jsonl and the result say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(sys.executable).with_name("claw-plan")


def ran(plan: Path, steps: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The result of two ranks that trained so many steps, and the lines of steps.jsonl."""
    command = [PROGRAM, "run", plan, "--no-preflight", "--json", "--steps", str(steps)]
    done = subprocess.run(
        [*command, "--runs", plan.with_suffix("")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    found = json.loads(done.stdout)
    lines = (Path(found["run"]) / "steps.jsonl").read_text().splitlines()
    return found, [json.loads(line) for line in lines]


@pytest.mark.slow
def test_a_step_that_the_one_before_leaves_nothing_does_not_count(
    tiny_plan: Callable[..., Path],
) -> None:
    """After a recorded step no bucket is on its way: the next waits for none, and is too short."""
    knobs = {"buckets": (2, 12, 12, 12, 14), "bucket_order": (0, 1, 4, 2, 3)}
    found, lines = ran(tiny_plan("ahead", dp_replicate=2, **knobs), 11)
    plain = {line["step"]: line.get("phase") for line in lines if line["way"] == "plain"}
    assert plain == {1: "fresh", 2: None, 6: "fresh", 7: None, 9: "fresh", 10: None}
    times = [line["step_time_ms"] for line in lines]
    counted = [times[step - 1] for step in (2, 7, 10)]
    # Lines are of rank 0, the result of the slowest; they meet for the loss in every step.
    assert found["step_time_ms"]["median"] >= sorted(counted)[1]
    assert found["unlike_plan"] is None


@pytest.mark.slow
def test_a_run_within_a_warm_up_is_not_compared(tiny_plan: Callable[..., Path]) -> None:
    plan = tiny_plan("warm", dp_replicate=2, codec="one_bit")
    within, lines = ran(plan, 4)
    assert [line.get("phase") for line in lines] == ["warm-up"] * 4
    assert "codec_warmup_steps" in within["unlike_plan"]
    plan.write_text(plan.read_text().replace("codec_warmup_steps: 300", "codec_warmup_steps: 3"))
    beyond, lines = ran(plan, 9)
    assert [line.get("phase") for line in lines] == ["warm-up"] * 3 + [None] * 6
    assert beyond["unlike_plan"] is None
