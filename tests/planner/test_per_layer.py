"""Two blocks by hand: the backward's slots, reductions, and the largest moment."""

from __future__ import annotations

import numpy as np
import pytest

from claw_plan.planner.per_layer import LayerChoices, LayerOption, LayerTable, StepEnds


def by_hand(*, microbatches: int = 1, reduce_ns: int = 4, capacity_bytes: int = 10_000):
    """Prologue, two equal blocks with the options (full, reshard) and (none, keep), epilogue."""
    inner = np.array([[30, 20], [30, 20]])
    ends = np.array([[1, 1]])
    return LayerChoices(
        table=LayerTable(
            compute_ns=np.vstack([ends * 5, inner, ends * 7]),
            gather_ns=np.array([[0, 0], [25, 0], [25, 0], [0, 0]]),
            reduce_ns=np.array([0, reduce_ns, reduce_ns, 0]),
            held_bytes=np.array([[1, 1], [10, 100], [10, 100], [2, 2]]),
            forward_bytes=np.array([[0, 0], [20, 120], [20, 120], [5, 5]]),
            kernel_bytes=np.array([[3, 3], [90, 110], [90, 110], [8, 8]]),
            reduced_bytes=np.array([1, 15, 15, 9]),
            coming_bytes=np.array([[0, 0], [40, 0], [40, 0], [0, 0]]),
        ),
        ends=StepEnds(
            num_microbatches=microbatches,
            forward_ns=50,
            accumulate_ns=3,
            root_reduce_ns=6,
            reduces_ns=2 * reduce_ns + 6,
            after_ns=9,
            always_bytes=1000,
            end_bytes=12,
        ),
        options=(LayerOption("full", "reshard"), LayerOption("none", "keep")),
        capacity_bytes=capacity_bytes,
    )


@pytest.mark.parametrize(
    "row, backward",
    [
        # epilogue beside the second block's gather 25, second beside the first's, first, prologue
        ((0, 0), 25 + 30 + 30 + 5),
        ((1, 1), 7 + 20 + 20 + 5),
        ((1, 0), 25 + 30 + 20 + 5),  # row = (first, second): the second is gathered
        ((0, 1), 7 + 25 + 30 + 5),  # the first's gather outlasts the second's 20
    ],
)
def test_a_unit_lasts_as_long_as_the_gather_beside_it(row, backward):
    # The root's reduction of 6 follows the last backward.
    scores = by_hand().scores(np.array([row]))
    assert scores.time_ns[0] == 50 + backward + 6 + 9


def test_slow_reductions_end_the_step():
    # The second block's reduction starts at 25 + 30 and all three follow each other.
    scores = by_hand(reduce_ns=500).scores(np.array([[0, 0]]))
    assert scores.time_ns[0] == 50 + 55 + 500 + 500 + 6 + 9


def test_microbatches_repeat_and_add_up():
    # Two of 50 + 90; adding up 3 falls behind the last reduction of 6.
    scores = by_hand(microbatches=2).scores(np.array([[0, 0]]))
    assert scores.time_ns[0] == 2 * (50 + 90) + 6 + 9
    slow = by_hand(microbatches=2, reduce_ns=500).scores(np.array([[0, 0]]))
    assert slow.time_ns[0] == 50 + 55 + 2 * (500 + 500 + 6) + 9


@pytest.mark.parametrize(
    "row, need",
    [
        # In the second block's kernels 90 with 40 coming, above 10 of the first and 1.
        ((0, 0), 1 + 10 + 90 + 40),
        # The second's forward 120, above the first's 100 and 1.
        ((1, 1), 1 + 100 + 120),
        ((1, 0), 1 + 100 + 90),
        ((0, 1), 1 + 10 + 110 + 40),
    ],
)
def test_the_largest_moment_counts(row, need):
    exactly = by_hand(capacity_bytes=1000 + need)
    assert exactly.scores(np.array([row])).excess_bytes[0] == 0
    short = by_hand(capacity_bytes=1000 + need - 7)
    assert short.scores(np.array([row])).excess_bytes[0] == 7


def test_options_start_at_the_least_memory_and_have_features():
    choices = by_hand()
    assert choices.sizes == (2, 2) and choices.start == (0, 0)
    assert choices.uniform(LayerOption("none", "keep")) == (1, 1)
    assert choices.features.shape[:2] == (2, 2)
    assert np.isfinite(choices.features).all()
