"""Messages name file, line, row and key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.published_fields import (
    BrokenRows,
    Fields,
    Row,
    line_of,
    load_yaml,
    shown,
)


def fields(values: dict[str, Any], path: Path = Path("none.csv")) -> Fields:
    return Fields(Row(path, (3,), "run-1"), values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "none.csv:3: row 'run-1': layers is missing"),
        ({"layers": None}, "layers is missing"),
        ({"layers": "many"}, "layers must be a whole number of at least 1; got 'many'"),
        ({"layers": 0}, "at least 1"),
        ({"layers": 1.5}, "whole number"),
        ({"layers": True}, "whole number"),
        ({"layers": float("inf")}, "whole number"),
        ({"layers": float("nan")}, "whole number"),
        ({"layers": "nan"}, "whole number"),
        ({"layers": 10**400}, "whole number"),
        ({"layers": 10**5000}, "got a number of thousands of digits"),
        ({"layers": "9" * 1000}, "whole number"),
        ({"layers": 10**16}, "whole number"),
    ],
)
def test_what_is_no_whole_number(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        fields(values).whole("layers")
    assert message in str(error.value)


def test_values_of_the_right_kind() -> None:
    some = fields({"n": 4.0, "x": 2, "t": 5, "yes": True, "list": ["a", 1], "part": {"k": 7}})
    assert some.whole("n") == 4
    assert some.number("x") == 2.0
    assert some.text("t") == "5"
    assert some.truth("yes", False)
    assert some.texts("list") == ("a", "1")
    assert some.texts("absent") == ()
    assert some.part("part").whole("k") == 7
    assert "n" in some and "absent" not in some


@pytest.mark.parametrize("method", ["number", "part", "text"])
def test_values_of_another_kind(method: str) -> None:
    with pytest.raises(InputError, match=r"row 'run-1': key must"):
        getattr(fields({"key": ["a"]}), method)("key")


def test_numbers_may_be_written_as_text() -> None:
    some = fields({"n": "4096", "x": "1e3"})  # YAML 1.1 reads 1e3 as a text
    assert some.whole("n") == 4096
    assert some.number("x") == 1000.0


def test_what_is_quoted_is_short() -> None:
    bomb: list[Any] = ["x"]
    for _ in range(40):  # 2^40 texts
        bomb = [bomb, bomb]
    assert len(shown(bomb)) < 1000
    assert len(shown("9" * 10**6)) < 100
    with pytest.raises(InputError, match="must be a whole number"):
        fields({"layers": bomb}).whole("layers")


def test_broken_rows_are_listed_unless_all_are() -> None:
    broken = BrokenRows()
    with broken.caught("run-1", "lab"):
        fields({}).whole("layers")
    (one,) = broken.among(others=1)
    assert (one.id, one.family) == ("run-1", "lab")
    assert one.reason.endswith("layers is missing")
    with pytest.raises(InputError, match="layers is missing"):
        broken.among(others=0)


def test_a_part_is_named_in_the_message() -> None:
    with pytest.raises(InputError, match=r"model\.moe\.topk is missing"):
        fields({"model": {"moe": {}}}).part("model").part("moe").whole("topk")


def test_the_line_of_a_row(write_rows: Callable[..., Path]) -> None:
    path = write_rows([{"id": 1, "a": 2}, {"id": 2}])
    assert line_of(path, (0,)) == 1
    assert line_of(path, (1,)) == 3
    assert line_of(path, (7,)) is None


def test_what_is_no_yaml(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("a: [1,\nb: }", encoding="utf-8")
    with pytest.raises(InputError, match=r"bad\.yaml:2: not YAML"):
        load_yaml(path)
    for value in ("2026-13-45", "9" * 5000):  # no date, and more digits than Python reads
        path.write_text(f"a: {value}", encoding="utf-8")
        with pytest.raises(InputError, match=r"bad\.yaml: not YAML"):
            load_yaml(path)
