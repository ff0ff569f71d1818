"""The page docs/accuracy.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from claw_plan.cli.accuracy_board import CROSS_VALIDATION, PEERS, table, write_board
from claw_plan.cli.validation_scores import COLLECTIVE, STEP_TIME, RowScore, Scores
from claw_plan.profiles.accuracy import Pair
from claw_plan.profiles.errors import InputError
from claw_plan.profiles.published_rows import NotExpressed

SCORES = Scores(
    rows=(
        RowScore(
            id="a",
            family="somebody",
            quantity=STEP_TIME,
            pair=Pair(predicted=11.0, measured=10.0),
        ),
        RowScore(
            id="b",
            family="all_reduce | H100",
            quantity=COLLECTIVE,
            pair=Pair(predicted=8.0, measured=10.0),
        ),
    ),
    not_expressed=(NotExpressed(id="c", family="somebody", reason="no GPU"),),
)


def test_a_page_with_its_plots(tmp_path: Path) -> None:
    written = write_board(SCORES, ["runs.yaml"], tmp_path / "accuracy.md")
    names = [path.relative_to(tmp_path).as_posix() for path in written]
    assert names == ["accuracy.md", "accuracy/step_time.svg", "accuracy/collective_time.svg"]
    assert all(path.exists() for path in written)
    text = (tmp_path / "accuracy.md").read_text(encoding="utf-8")
    assert "| somebody | 1 | 10.0 | 10.0 | 10.0 | +10.0 |" in text
    assert "| all_reduce \\| H100 | 1 | 20.0 |" in text
    assert "(accuracy/step_time.svg)" in text
    assert "| 1 | no GPU |" in text
    assert "Not counted yet" in text
    assert all(peer in text for _, peer in PEERS)


def test_the_same_scores_give_the_same_page(tmp_path: Path) -> None:
    first = [path.read_bytes() for path in write_board(SCORES, ["a"], tmp_path / "a.md")]
    second = [path.read_bytes() for path in write_board(SCORES, ["a"], tmp_path / "a.md")]
    assert first == second


def test_cross_validated_errors_are_shown(tmp_path: Path) -> None:
    folder = tmp_path / "accuracy"
    folder.mkdir()
    errors = {"mape": 6.25, "median": 4.0, "p90": 13.0, "bias": -0.5, "n": 430}
    content = {"group": {"all families": errors}, "device": {"somebody": {"n": 3}}}
    (folder / CROSS_VALIDATION).write_text(json.dumps(content), encoding="utf-8")
    write_board(SCORES, ["runs.yaml"], tmp_path / "accuracy.md")
    text = (tmp_path / "accuracy.md").read_text(encoding="utf-8")
    assert "### Left out: group" in text
    assert "| all families | 430 | 6.2 | 4.0 | 13.0 | -0.5 |" in text
    assert "| somebody | 3 | - | - | - | - |" in text


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[1]", "must map")])
def test_a_broken_file_of_errors(tmp_path: Path, text: str, message: str) -> None:
    folder = tmp_path / "accuracy"
    folder.mkdir()
    (folder / CROSS_VALIDATION).write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        write_board(SCORES, ["runs.yaml"], tmp_path / "accuracy.md")


def test_tables_of_markdown() -> None:
    assert table(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
