"""The compiled cut against the one in Python, and memory floors written out by hand."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.planner.pipeline_bound import Chain, Pipelines, bound_pipelines, cut_evenly
from claw_plan.planner.stage_cut import cut_chain

TIMES = st.lists(st.integers(0, 20), min_size=3, max_size=12)


@settings(deadline=None)  # the first call compiles
@given(TIMES, st.integers(1, 5), st.data())
def test_cuts_as_python_does(times, num_stages, data):
    starts = [unit for unit in range(1, len(times)) if data.draw(st.booleans())]
    first = np.empty(num_stages + 1, np.int64)
    total = np.array([0, *accumulate(times)])
    found = cut_evenly(total, np.array([0, *starts, len(times)]), first)
    expected = cut_chain(times, num_stages, starts)
    assert found == (expected is not None)
    if expected is not None:
        assert first.tolist() == [start for start, _ in expected] + [len(times)]


def bound(
    pp, *, stages_per_rank=1, microbatches=4, capacity_bytes=1000, places_v=False, units=4,
    runs_again=0, remakes=0, again_ns=0,
):  # fmt: skip
    """Units of 1 ns forward and 2 ns backward that hold 10 bytes and store 100.

    All but the first and the last are blocks, which may run again, and then hold 1 byte.
    """
    last = units - 1
    units = np.arange(units + 1)
    blocks = np.clip(units - 1, 0, last - 1)
    again = again_ns * blocks
    columns = np.stack(
        [units, 2 * units, 2 * units, 0 * units, 3 * units, 3 * units + again, again]
    )
    chain = Chain(
        edges=units,
        times_ns=columns[None],
        held_bytes=np.stack([10 * units, 10 * units - 9 * blocks * (again_ns > 0)])[None],
        stored_bytes=100 * units[None],
        whole_bytes=50 * units[None],
        shard_bytes=5 * units[None],
    )
    zero = np.zeros(1, np.int64)
    some = Pipelines(
        pp=np.array([pp]),
        stages_per_rank=np.array([stages_per_rank]),
        microbatches=np.array([microbatches]),
        places_v=np.array([places_v]),
        splits=np.array([False]),
        is_recomputed=np.array([again_ns > 0]),
        runs_again=np.array([runs_again]),
        remakes=np.array([remakes]),
        capacity_bytes=np.array([capacity_bytes]),
        times=zero,
        held=zero,
        stored=zero,
        whole=zero,
        layout=zero,
        flights=np.array([[min(microbatches, pp - rank) for rank in range(pp)]]),
    )
    longest, may_fit = np.empty(1, np.int64), np.empty(1, np.int64)
    bound_pipelines(chain, some, longest, may_fit)
    return int(longest[0]), int(may_fit[0])


@pytest.mark.parametrize(
    ("pp", "more", "need"),
    [
        (1, {}, 4 * (100 + 10 + 5)),  # gradients of other microbatches are sharded
        (1, {"microbatches": 1}, 4 * (100 + 10)),
        (4, {}, 100 + 50 + 4 * 10),  # the first rank holds four microbatches, all gradients
        (2, {"stages_per_rank": 2}, 2 * 100 + 2 * 50 + 2 * 10),  # on either of two stages
        (2, {"stages_per_rank": 2, "places_v": True}, 2 * 100 + 2 * 50 + 2 * 10),
    ],
)
def test_memory_is_ruled_out_one_byte_below_its_floor(pp, more, need):
    assert bound(pp, capacity_bytes=need, **more)[1] == 1
    assert bound(pp, capacity_bytes=need - 1, **more)[1] == 0


def test_a_cut_that_is_not_the_best_may_be_the_one_that_fits():
    """Two stages of 2 units need 2 x 150 + 2 x 20 and 2 x 150 + 20; 3 to the last need 480."""
    assert bound(2, capacity_bytes=339)[1] == 0  # 340 and 320, but 180 and 480
    assert bound(2, capacity_bytes=480)[1] == 1


def test_the_path_of_equal_stages_is_the_closed_form():
    """(m + p - 1) (F + B) of 1F1B; v stages a rank shorten the way in and out."""
    assert bound(4)[0] == (4 + 4 - 1) * 3
    assert bound(2, stages_per_rank=2)[0] == 4 * 6 + 3


def test_the_first_blocks_of_each_stage_run_again():
    """Of 6 units 4 are blocks: 2 and 2 of two stages, of which one each runs again for 7 ns."""
    assert bound(1, units=6, again_ns=7)[0] == 4 * (6 * 3 + 4 * 7)
    assert bound(1, units=6, again_ns=7, runs_again=3)[0] == 4 * (6 * 3 + 3 * 7)
    assert bound(2, units=6, again_ns=7, runs_again=1)[0] == (4 + 1) * (3 * 3 + 7)
    assert bound(2, units=6, again_ns=7, runs_again=5) == bound(2, units=6, again_ns=7)


@pytest.mark.parametrize(
    ("remakes", "held"), [(1, 20 + 1 + 30), (3, 20 + 3 + 10), (4, 20 + 4), (0, 20 + 4)]
)
def test_what_runs_again_is_not_held(remakes, held):
    """Two units at the ends and the blocks that are kept hold 10 bytes, the others 1."""
    need = 6 * (100 + 5) + held
    found = [
        bound(1, units=6, again_ns=7, runs_again=1, remakes=remakes, capacity_bytes=room)[1]
        for room in (need - 1, need)
    ]
    assert found == [0, 1]


def test_more_stages_than_units_are_told():
    assert bound(5) == (-1, -1)
