"""What compiled bounds of any cut assume of schedules, and pipelines worked out by hand."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from claw_plan.planner.cut_bound import bound_any_cut, cuts_below, flight_of, rank_of
from claw_plan.planner.pipeline_bound import Chain, Pipelines
from claw_plan.planner.schedules import (
    SCHEDULES,
    least_in_flight,
    rank_of_stage,
    schedule_columns,
    schedule_refusal,
)

LAYOUTS = [
    (name, pp, count, per_rank)
    for name, per_rank in [
        ("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 3),
        ("InterleavedZeroBubble", 1), ("InterleavedZeroBubble", 2), ("ZBVZeroBubble", 2),
        ("DualPipeV", 2),
    ]
    for pp, count in [(2, 4), (2, 6), (3, 6), (4, 8), (4, 16)]
]  # fmt: skip


def pipeline(name, pp, count, per_rank, *, capacity_bytes=1 << 40, work=(1, 1, 1, 1)):
    """Blocks that take so long forwards and twice that backwards, hold 1 byte and store 10."""
    total = np.array([0, *np.cumsum(work)])
    units = np.arange(len(work) + 1)
    columns = [total, 2 * total, 2 * total, 0 * total, 3 * total, 3 * total, 0 * total]
    chain = Chain(
        edges=units,
        times_ns=np.stack(columns)[None],
        held_bytes=np.stack([units, units])[None],
        stored_bytes=10 * units[None],
        whole_bytes=0 * units[None],
        shard_bytes=0 * units[None],
    )
    zero = np.zeros(1, np.int64)
    some = Pipelines(
        pp=np.array([pp]),
        stages_per_rank=np.array([per_rank]),
        microbatches=np.array([count]),
        places_v=np.array([SCHEDULES[name].places_v]),
        splits=np.array([False]),
        is_recomputed=np.array([False]),
        runs_again=zero,
        remakes=zero,
        capacity_bytes=np.array([capacity_bytes]),
        times=zero,
        held=zero,
        stored=zero,
        whole=zero,
        layout=zero,
        flights=least_in_flight(name, pp, count, per_rank)[None],
    )
    return chain, some


@pytest.mark.parametrize(("name", "pp", "count", "per_rank"), LAYOUTS)
def test_what_is_in_flight_is_what_rows_begin_with(name, pp, count, per_rank):
    """At one moment of a rank, before its first backward, its stages hold as many."""
    if schedule_refusal(name, pp, count, per_rank):
        pytest.skip("too few microbatches")
    _, some = pipeline(name, pp, count, per_rank)
    rows = schedule_columns(name, pp, count, per_rank)
    v = SCHEDULES[name].places_v
    for stage in range(pp * per_rank):
        assert rank_of(stage, pp, v) == rank_of_stage(name, stage, pp)
    for rank in range(pp):
        own = [stage for stage in range(pp * per_rank) if rank_of(stage, pp, v) == rank]
        kinds, stages = (c[slice(*rows.first[rank : rank + 2])] for c in (rows.kind, rows.stage))
        forwards = int(np.flatnonzero(kinds > 0)[0])
        held = [[(stages[:n] == s).sum() for s in own] for n in range(forwards + 1)]
        assert [flight_of(some, 0, stage) for stage in own] in held
        assert sum(flight_of(some, 0, stage) for stage in own) >= forwards - 1


def path_ns(firsts, work, count):
    """1F1B: fill, m microbatches and drain of every stage, each unit 1 + 2 times its work."""
    stages = [sum(work[a:b]) for a, b in pairwise(firsts)]
    return max(3 * (sum(stages[:s]) + count * stages[s]) for s in range(len(stages)))


@pytest.mark.parametrize(
    "work", [(1, 1, 1, 1, 1, 1, 1), (5, 1, 1, 3, 1, 1, 8), (0, 2, 9, 1, 1, 4)]
)
@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_the_least_of_all_cuts_and_all_below_it(work, pp, count):
    chain, some = pipeline("1F1B", pp, count, 1, work=work)
    cuts = [(0, *inner, len(work)) for inner in combinations(range(1, len(work)), pp - 1)]
    paths = {cut: path_ns(cut, work, count) for cut in cuts}
    least = np.zeros(1, np.int64)
    bound_any_cut(chain, some, np.array([10_000]), least)
    closest = min(paths.values())
    assert closest * 0.99 - 10_000 / 16 <= least[0] <= closest
    limit = sorted(paths.values())[len(paths) // 2] + 1
    found = np.empty((len(cuts), pp + 2), np.int64)
    number, _ = cuts_below(chain, some, 0, limit, 100_000, found)
    assert {tuple(f[:-1]): f[-1] for f in found[:number].tolist()} == {
        cut: ns for cut, ns in paths.items() if ns < limit
    }


def test_what_no_cut_can_hold_is_left_out():
    """Of 4 units 2 on either of 2 ranks store 20 bytes, the first holds 2 x 2 and the last 2."""
    for capacity, expected in ((24, [[0, 2, 4]]), (23, [])):
        chain, some = pipeline("1F1B", 2, 4, 1, capacity_bytes=capacity)
        found = np.empty((10, 4), np.int64)
        number, _ = cuts_below(chain, some, 0, 1 << 60, 1000, found)
        assert found[:number, :-1].tolist() == expected
        least = np.zeros(1, np.int64)
        bound_any_cut(chain, some, np.array([1000]), least)
        assert (least[0] == 1000) == (not expected)
