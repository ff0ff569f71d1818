from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.topology.source import Source
from claw_plan.profiles.topology.structured import load, number, numbers, whole


def test_keys_know_their_lines() -> None:
    document = load(Source("a.json", '{\n "a": {"x": 1},\n "b": [\n {"x": 2.5}]}'))
    assert document is not None
    assert document.where(["b", 0, "x"]) == "a.json:4: b[0].x"
    assert number(document, "b", 0, "x", limit=3) == 2.5
    assert whole(document, "a", "x", limit=3) == 1


def test_yaml_lists() -> None:
    document = load(Source("a.yml", "rates: [1.5, '2']\none: 3\n"))
    assert document is not None
    assert numbers(document, "rates", 10) == [1.5, 2.0]
    assert numbers(document, "one", 10) == [3.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "b"', "a.json:2: not valid JSON"),
        ('{"a": 1, "a": 2}', "a key stands twice"),
        ('{"a": NaN}', "NaN is no number"),
        ('{"a": ' + "9" * 1_000_000 + "}", "a.json:1: JSON that is refused"),
        ('{"a": "' + "9" * 8_000_000 + '"}', "more than 8 MB of JSON"),
        ('{"a": ' + "9" * 10_000 + "}", "a.json:1: JSON that is refused"),
        ('{"a": ' * 2000 + "1" + "}" * 2000, "a.json|nested deeper"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(Source("a.json", text))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('"x"', "t:1: a: must be a number; got 'x'"),
        ("true", "t:1: a: must be a number"),
        ("1e999", "t:1: a: must be a number"),
        ("0", "t:1: a: 0 is implausible"),
        ("-1", "t:1: a: -1 is implausible"),
        ("101", "t:1: a: 101 is implausible.*is the unit right"),
        ("9" * 400, "t:1: a: .*implausible"),
    ],
)
def test_numbers_that_are_none(value: str, message: str) -> None:
    document = load(Source("t", '{"a": ' + value + "}"))
    assert document is not None
    with pytest.raises(InputError, match=message):
        number(document, "a", limit=100)


def test_missing_keys_and_broken_counts() -> None:
    document = load(Source("t", '{"a": 1.5}'))
    assert document is not None
    with pytest.raises(InputError, match="b: this key is missing"):
        number(document, "b", limit=1)
    with pytest.raises(InputError, match="must be a whole number"):
        whole(document, "a", limit=10)


def test_prose_is_no_document() -> None:
    assert load(Source("t", "just words\nand more")) is None
    assert load(Source("t", "a: [1\nb: }")) is None


@given(st.text(alphabet='{}[]":,1aNeE.-\n ', max_size=120))
@settings(max_examples=200, deadline=None)
def test_any_text_is_loaded_or_refused(text: str) -> None:
    try:
        load(Source("t", "{" + text))
    except InputError as error:
        assert "\n" not in str(error)
