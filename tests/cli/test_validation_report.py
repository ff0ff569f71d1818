"""The printed report of a validation."""

from __future__ import annotations

import pytest
from rich.console import Console

from claw_plan.cli.validation_report import figure, print_validation
from claw_plan.cli.validation_scores import ASSUMED, MEMORY, STEP_TIME, RowScore, Scores
from claw_plan.profiles.accuracy import Pair
from claw_plan.profiles.published_rows import NotExpressed


def score(name: str, predicted: float, measured: float, **others: object) -> RowScore:
    pair = Pair(predicted=predicted, measured=measured)
    values = {"family": "somebody", "quantity": STEP_TIME} | others
    return RowScore(id=name, pair=pair, **values)  # type: ignore[arg-type]


def test_every_row_and_family_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    scores = Scores(
        rows=(
            score("run-a", 1100.0, 1000.0),
            score("run-b", 900.0, 1000.0, counts=ASSUMED, flags=("odd",)),
            score("run-c", 9.0, 10.0, quantity=MEMORY, family="other"),
        ),
        not_expressed=(NotExpressed(id="run-d", family="other", reason="no [such] GPU"),),
        verdicts=((True, True), (False, False)),
    )
    console = Console(width=120, force_terminal=False)
    print_validation(scores, console)
    text = capsys.readouterr().out
    assert "run-a  step_time  predicted 1,100 ms  measured 1,000 ms  +10.0 %\n" in text
    assert "-10.0 %  (assumed, odd)" in text
    assert "Flagged odd: 1 rows" in text
    assert "predicted 9.000 GiB" in text
    assert "not expressed  run-d: no [such] GPU" in text
    assert "1 of 1 told, 0 false alarms among 1" in text
    assert "Errors of step times, in %" in text
    (line,) = [line for line in text.splitlines() if "somebody" in line]
    assert line.split()[1:5] == ["2", "10.0", "10.0", "10.0"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1234.5, "1,234"),
        (12.346, "12.35"),
        (1.2346, "1.235"),
        (0.012346, "0.01235"),
        (0.0, "0.000"),
    ],
)
def test_figures(value: float, text: str) -> None:
    assert figure(value) == text
