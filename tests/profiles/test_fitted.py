from __future__ import annotations

from pathlib import Path

from claw_plan.profiles import catalogue
from claw_plan.profiles.fitted import FITTED_FILE, Fitted, fitted
from claw_plan.profiles.rates import RATES
from claw_plan.profiles.trainers import load_trainers


def test_without_a_file_nothing_is_fitted(tmp_path: Path) -> None:
    assert fitted(tmp_path / "none.yaml") == Fitted()


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "fitted.yaml"
    path.write_text(
        "source: some runs\nshared: {step_ns: 5}\n"
        "rates:\n  l4: {half: 6.0e+13}\ntrainers:\n  torch: {host_ns: 2e4}\n"
    )
    read = fitted(path)
    assert read.source == "some runs"
    assert read.rates == {"l4": {"half": 6e13}}
    assert read.trainers == {"torch": {"host_ns": 2e4}}
    assert read.shared == {"step_ns": 5.0}


def test_the_committed_file_names_what_the_program_knows() -> None:
    assert FITTED_FILE.is_file()
    committed = fitted()
    assert "sha256" in committed.source
    for name, rates in committed.rates.items():
        assert catalogue.device(name).achieved_flops_per_s
        assert set(rates) <= set(RATES)
    trainers = load_trainers()
    for name, constants in committed.trainers.items():
        assert set(constants) <= set(trainers[name].fitted)
        assert len(constants) <= 6
