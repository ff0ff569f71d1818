from __future__ import annotations

from pathlib import Path

import yaml

from claw_plan.planner.trainer_fitter import FITTER, text_of
from claw_plan.profiles.fit.registry import DataFile, fitters

VALUES = {
    ("shared", "", "step_ns"): 5_123_456.7,
    ("rate", "l4", "half"): 5.98765e13,
    ("rate", "l4", "attention"): 4.4e13,
    ("trainer", "torch", "host_ns"): 20_123.4,
    ("trainer", "torch", "overlap_loss"): 0.251234,
}


def data(content: object) -> DataFile:
    return DataFile(path=Path("runs.yaml"), data=content, sha256="0" * 64)


def test_the_text_is_read_back_to_four_figures_whatever_the_order() -> None:
    text = text_of(VALUES, [data([])])
    assert text == text_of(dict(reversed(VALUES.items())), [data([])])
    read = yaml.safe_load(text)
    assert read["shared"] == {"step_ns": 5.123e6}
    assert read["rates"] == {"l4": {"attention": 4.4e13, "half": 5.988e13}}
    assert read["trainers"] == {"torch": {"host_ns": 20120, "overlap_loss": 0.2512}}
    assert "runs.yaml (sha256 0000000000000000)" in read["source"]


def test_runs_and_iterations_are_recognised_and_other_tables_are_not() -> None:
    run = {"id": "a", "model": {}, "hardware": {}, "plan": {}, "measured": {}}
    assert FITTER.recognises(data([run]))
    assert FITTER.recognises(data([{"# GPUs": "8", "iteration time (ms)": "5"}]))
    assert not FITTER.recognises(data({"nccl_tests": {"rows": []}}))
    assert not FITTER.recognises(data([]))


def test_the_fit_command_finds_it() -> None:
    assert "training" in {fitter.kind for fitter in fitters()}
