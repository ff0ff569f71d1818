from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from claw_plan.cli.report import (
    print_plan_report,
    print_simulation,
    report_console,
    search_sentence,
)
from claw_plan.planner.baseline import Baseline
from claw_plan.profiles.units import GIB


def report(result: Any, width: int, **settings: Any) -> str:
    text = io.StringIO()
    console = Console(file=text, width=width, highlight=False, **settings)
    print_plan_report(result, "claw-plan run plan.yaml", console)
    return text.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_the_report_fits_the_width_and_says_everything(result: Any, width: int) -> None:
    text = report(result, width)
    assert max(len(line) for line in text.splitlines()) <= width
    words = " ".join(text.split())
    for said in (
        "GPT, 124.5 M parameters, 1024 tokens a sample, global batch 64, bfloat16",
        "on one-node: 1 x dgx-a100-80gb, 8 x A100-SXM4-80GB",
        "pp=2, dp_shard=4, 1F1B, zero 3, microbatch 4",
        "40.0 ms a step, 1,600 samples/s, 1.64 M tokens/s, MFU 50 %",
        "8 devices, at most 76.0 GiB of 80.0 GiB usable on each",
        "42.0 ms +5.0 % 1.56 M tok 30.0 GiB",
        "60.0 ms +50 % 1.09 M tok 30.0 GiB",
        "data-parallel communication",
        "compute utilisation 75 % rule of thumb: over 85 %",
        "communication share 10 % rule of thumb: under 15 %",
        "(rule of thumb: 10 %)",
        "these times rest on: analytic 75 %, measured 25 %",
        "tp: its all-reduces would cost 9.0 ms a step",
        "one non-blocking switch joins the nodes",
        "claw-plan run plan.yaml",
    ):
        assert said in words


def test_nothing_is_cut_off_at_80_columns(result: Any) -> None:
    text = report(result, 80)
    assert "…" not in text
    for word in ("DDP", "needs", "12.0", "stage 0", "activations 75.0 GiB", "parameters 1.0 GiB"):
        assert word in text


def test_a_pipe_gets_plain_text_and_a_terminal_colour(result: Any) -> None:
    assert "\x1b[" not in report(result, 80)
    assert "\x1b[" in report(result, 80, force_terminal=True, color_system="standard")


def test_names_of_the_user_are_no_markup(result: Any) -> None:
    result.reasons = ("[bold]h[0:6][/bold] stays",)
    assert "[bold]h[0:6][/bold] stays" in report(result, 80)


def test_a_model_without_a_sequence_counts_samples(result: Any) -> None:
    result.best = replace(result.best, tokens_per_s=None, mfu=None)
    result.alternatives, result.baselines = (), {}
    result.graph.seq_len = None
    text = report(result, 120)
    assert "tokens" not in text and "MFU" not in text
    assert "1,600 smp" in text


def test_a_simulation_shows_one_plan(result: Any) -> None:
    text = io.StringIO()
    print_simulation(result.best, "plan.yaml", Console(file=text, width=80))
    assert "Prediction for plan.yaml" in text.getvalue()
    assert "pipeline bubble" in text.getvalue()


def test_a_search_that_was_cut_says_how_far_it_may_be(result: Any) -> None:
    assert "The best is proven" in search_sentence(result.search)
    cut = replace(result.search, gap=0.034)
    assert "Not proven: the best of all ways may be up to 3.4 % faster" in search_sentence(cut)


def test_a_narrow_terminal_wraps_and_a_closed_pipe_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert report_console().width == 72
    with pytest.raises(BrokenPipeError):
        report_console().on_broken_pipe()


def test_the_users_own_setting_stands_beside_the_best(result: Any) -> None:
    own = replace(result.best, step_time_ns=2 * result.best.step_time_ns)
    result.given = Baseline(name="DeepSpeed: ds.json", scored=own, notes=("ds.json:3: left open",))
    words = " ".join(report(result, 120).split())
    assert "yours" in words and "80.0 ms +100 %" in words
    assert "Your setting, DeepSpeed: ds.json - ds.json:3: left open" in words


def test_a_setting_that_does_not_fit_shows_by_how_much_and_where(result: Any) -> None:
    small = tuple(replace(stage, capacity_bytes=70 * GIB) for stage in result.best.memory)
    result.given = Baseline(name="x", scored=replace(result.best, memory=small))
    words = " ".join(report(result, 300).split())
    assert "out of memory: stage 1 needs 76.0 GiB of 70.0 GiB on each device, 6.0 GiB" in words
    result.given = Baseline(name="x", scored=None, refused="train.sh:4: cp=2 is not simulated")
    assert "train.sh:4: cp=2 is not simulated" in " ".join(report(result, 300).split())


def test_the_certificate_names_the_objective(result: Any) -> None:
    said = search_sentence(result.search, "cost")
    assert "cannot be better" in said and "less of the objective 'cost'" in said
