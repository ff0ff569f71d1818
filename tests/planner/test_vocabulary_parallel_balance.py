"""Rows dealt out by the frequency of their tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.planner.errors import PlanError
from claw_plan.planner.vocabulary_parallel_balance import (
    balanced_rows,
    load_factor,
    read_counts,
)

ZIPF = 1 / np.arange(1, 50_258)


def test_zipf_is_balanced():
    """Contiguous rows: 8 (ln 6282 + 0.577) / (ln 50257 + 0.577) = 6.54 times the mean."""
    assert load_factor(ZIPF, None, 8) == pytest.approx(6.54, abs=0.005)
    rows = balanced_rows(ZIPF, 8)
    assert sorted(rows) == list(range(50_257))
    assert load_factor(ZIPF, rows, 8) <= 1.05
    runs = 1 + int((np.diff(rows) != 1).sum())
    assert runs < 10_000, "most rows stay beside their neighbours"
    assert rows == balanced_rows(ZIPF, 8)


def test_even_counts_stay_as_they_are():
    assert balanced_rows(np.ones(50), 8) == list(range(50))


def test_by_hand():
    """12 lookups; rows 0 and 1 are dealt: 6 to the rank with row 3, 3 to that with row 2."""
    assert balanced_rows(np.array([6.0, 3, 3, 0]), 2) == [1, 2, 0, 3]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 100), min_size=8, max_size=40).filter(sum),
    st.integers(2, 8),
)
def test_every_row_is_held_once_and_no_division_gets_worse(counts, degree):
    counts = np.array(counts, np.float64)
    rows = balanced_rows(counts, degree)
    assert sorted(rows) == list(range(len(counts)))
    assert load_factor(counts, rows, degree) <= load_factor(counts, None, degree)


def test_counts_are_read_from_text_and_arrays(tmp_path):
    (tmp_path / "counts.txt").write_text("3\n0\n1.5\n")
    np.save(tmp_path / "counts.npy", np.array([3, 0, 2]))
    assert read_counts(tmp_path / "counts.txt").tolist() == [3, 0, 1.5]
    assert read_counts(tmp_path / "counts.npy").tolist() == [3, 0, 2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("3 x 4", "it cannot be read so"),
        ("", r"an array of float64 in the shape \[0\]"),
        ("1 -2 3", "counts are 0 or more, but got -2 for token 1"),
        ("nan 1", "but got nan for token 0"),
        ("0 0", "but got zeros only"),
    ],
)
def test_what_are_no_counts_is_told(tmp_path, text, said):
    (tmp_path / "counts.txt").write_text(text)
    with pytest.raises(PlanError, match=said):
        read_counts(tmp_path / "counts.txt")


def test_a_file_that_is_absent_or_a_table_is_told(tmp_path):
    np.save(tmp_path / "table.npy", np.ones((2, 3)))
    for name, said in (("no.txt", "No such file"), ("table.npy", r"in the shape \[2, 3\]")):
        with pytest.raises(PlanError, match=said):
            read_counts(tmp_path / name)
