from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from claw_plan.cli.run_report import print_learned, print_run, print_verification
from claw_plan.executor.learn import Learned, LearnedRun
from claw_plan.executor.run_files import RunResult
from claw_plan.executor.verify import VerifyResult

RUN = RunResult(
    losses=[5.5, 4.25],
    step_time_ms={"median": 120.0, "min": 118.0, "max": 140.0},
    process_time_ms=110.0,
    samples_per_s=133.3,
    tokens_per_s=None,
    predicted_step_time_ms=108.0,
    peak_memory_bytes=[2 * 2**30, 3 * 2**30],
    predicted_memory_gib=[1.8, 3.0],
    parts_ms={"forward": 40.0, "backward": 70.0},
    data="the bytes of genesis.txt",
    run="runs/a run",
)
DIFFERS = VerifyResult(
    ok=False,
    steps=5,
    fp64_max_loss_diff=1e-3,
    fp64_max_param_diff=2e-2,
    fp32_max_loss_diff=1e-3,
    first_difference="h.0.ln.weight on rank 1 after step 2: 2.00e-02 in fp64",
)


def text_of(show: Callable[..., None], value: Any, width: int = 80) -> str:
    text = io.StringIO()
    show(value, Console(file=text, width=width, highlight=False))
    assert max(map(len, text.getvalue().splitlines())) <= width
    return " ".join(text.getvalue().split())


@pytest.mark.parametrize("width", [80, 120])
def test_a_run_shows_measured_beside_predicted(width: int) -> None:
    text = text_of(print_run, RUN, width)
    for said in (
        "2 steps on the bytes of genesis.txt",
        "loss 5.5000 at first, 4.2500 at last",
        "step, median (118 ms to 140 ms) 120 ms 108 ms -10 %",
        "peak memory, rank 0 2.0 GiB 1.8 GiB -10 %",
        "peak memory, rank 1 3.0 GiB 3.0 GiB +0.0 %",
        "forward 40.0 ms, backward 70.0 ms",
        "claw-plan learn 'runs/a run'",
    ):
        assert said in text


def test_a_plan_without_a_prediction_is_compared_with_nothing() -> None:
    values = {name: getattr(RUN, name) for name in RUN.__dataclass_fields__}
    values |= {"predicted_step_time_ms": None, "predicted_memory_gib": None}
    assert "120 ms - - peak memory, rank 0 2.0 GiB - -" in text_of(print_run, RunResult(**values))


ROW = {"ranks": "0-1,3", "op": "all_reduce", "axis": "tp", "group_size": 2, "calls": 4}


@pytest.mark.parametrize(
    ("different", "said"),
    [
        ([], "12 calls of all ranks with 3.0 MiB "),
        (["rank 0: a", "rank 1: b"], "with 3.0 MiB, not as predicted: rank 0: a (and 1 more)"),
    ],
)
def test_what_a_step_moved_is_told_once_and_where_it_is_not_as_predicted(different, said) -> None:
    """Of a message only the sending counts."""
    rows = [ROW | {"bytes": 1 << 20}, ROW | {"op": "recv", "bytes": 99}]
    values = {name: getattr(RUN, name) for name in RUN.__dataclass_fields__}
    values |= {"traffic": rows, "traffic_differences": different}
    assert said in text_of(print_run, RunResult(**values))


def test_a_verification_says_where_it_differs_first() -> None:
    text = text_of(print_verification, DIFFERS)
    assert "The plan differs: h.0.ln.weight on rank 1 after step 2" in text
    assert "parameters in fp64 differ by at most 2.0e-02" in text


def test_learning_shows_the_errors_before_and_after() -> None:
    run = LearnedRun(
        run="runs/1", knobs="tp=2", measured_ns=100_000, before_ns=150_000, after_ns=104_000
    )
    learned = Learned(profile=Path("cpu.profile"), measurements=52, runs=(run,), skipped=())
    text = text_of(print_learned, learned)
    assert "tp=2 100 us 150 us +50 % 104 us +4.0 %" in text
    assert "The median error was 50 % and is 4.0 % for these runs." in text
    assert "--profile cpu.profile" in text


def test_steps_that_are_not_the_plans_are_not_compared() -> None:
    run = LearnedRun(
        run="runs/1", knobs="tp=2", measured_ns=100_000, before_ns=150_000, after_ns=104_000,
        unlike_plan="a warm-up",
    )  # fmt: skip
    learned = Learned(profile=Path("cpu.profile"), measurements=52, runs=(run,), skipped=())
    text = text_of(print_learned, learned)
    assert "tp=2 100 us 150 us - 104 us -" in text
    assert "No run's steps were its plan's" in text
    values = {name: getattr(RUN, name) for name in RUN.__dataclass_fields__}
    text = text_of(print_run, RunResult(**values | {"unlike_plan": "a warm-up"}))
    assert "not the plan's steps: a warm-up" in text
