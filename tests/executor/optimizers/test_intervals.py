"""Marked steps against the sequence written out."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.executor.optimizers.intervals import count_marked, is_marked

STEPS = 300


@settings(deadline=None)
@given(st.integers(1, 40), st.none() | st.sampled_from([1, 2, 4, 16]))
def test_the_jth_distance_is_2_to_the_j_over_kappa(repeats: int, longest: int | None) -> None:
    distances = [2 ** (j // repeats) for j in range(STEPS)]
    if longest is not None:
        distances = [min(longest, distance) for distance in distances]
    marked = {0, *accumulate(distances)}
    before = 0
    for step in range(STEPS):
        assert is_marked(step, repeats, longest) == (step in marked)
        assert count_marked(step, repeats, longest) == before
        before += step in marked
