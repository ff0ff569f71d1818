"""Columns and the groups that they stand for."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.group_table import SCHEDULE_NAMES, Group, numbered, product_of, table_of

INNER_PP = ("dp_replicate", "dp_shard", "cp", "tp", "pp")


def test_a_row_is_a_group():
    interleaved = SCHEDULE_NAMES.index("Interleaved1F1B")
    columns = np.array([[2, 4, 3, 5, 8, interleaved, 2, 1, 2, 7, 1, -1, 1]]).T
    table = table_of([np.zeros((13, 0), np.int64), columns])
    base = Candidate(
        pp=2, tp=4, dp_replicate=3, microbatch_size=5, schedule="Interleaved1F1B",
        stages_per_rank=2, recompute="full", recompute_blocks=3, sequence_parallel=True,
        bucket_bytes=9, mesh_order=INNER_PP,
    )  # fmt: skip
    assert len(table) == 1 and table.num_devices.tolist() == [24]
    assert table.group(0, 9, INNER_PP, 3, 7) == Group(base=base, microbatches=8, size=7)


def test_a_space_may_be_empty():
    assert len(table_of([])) == 0


def test_every_combination_of_columns():
    found = product_of(np.array([[1, 2]]), np.array([[3, 4], [5, 6]]))
    assert found.T.tolist() == [[1, 3, 5], [1, 4, 6], [2, 3, 5], [2, 4, 6]]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 10**6)), max_size=40))
def test_combinations_are_numbered_in_order(pairs):
    """As sorting would number them, however large the values."""
    columns = np.array(pairs, np.int64).reshape(-1, 2).T
    first, which = numbered(*columns)
    distinct = sorted(set(pairs))
    assert [distinct.index(pair) for pair in pairs] == which.tolist()
    assert [pairs.index(pair) for pair in distinct] == first.tolist()
