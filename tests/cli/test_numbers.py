from __future__ import annotations

import pytest

from claw_plan.cli.numbers import format_count, percent


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0123, "0.012"),
        (12.34, "12.3"),
        (6139.4, "6,139"),
        (124_475_904, "124.5 M"),
        (1_571_000, "1.57 M"),
        (8.03e9, "8.03 B"),
        (1.4e12, "1.40 T"),
    ],
)
def test_counts_for_people(number: float, text: str) -> None:
    assert format_count(number) == text


def test_percent() -> None:
    assert [percent(0.5), percent(0.032), percent(0.05, sign=True)] == ["50 %", "3.2 %", "+5.0 %"]
