"""Shares of the batch by speed, against every division."""

from __future__ import annotations

import pytest

from claw_plan.planner.mixed.shares import Shares


def shares_of(toys, mixed_toys, speeds: list[float], *, batch: int, **kind) -> Shares:
    kinds = [mixed_toys.ToyKind(devices=1, flops_per_s=speed * 1e6, **kind) for speed in speeds]
    graph = toys.graph(layers=2, hidden=0, tied=False)
    return Shares(mixed_toys.mixed_scorer(toys, kinds, global_batch=batch, graph=graph))


@pytest.mark.parametrize(
    "speeds, batch, best",
    [([1, 2], 6, (2, 4)), ([1, 3], 32, (8, 24)), ([1, 2.1, 1.1], 8, (2, 4, 2))],
)
def test_the_best_division_is_that_of_all_simulated(toys, mixed_toys, speeds, batch, best):
    shares = shares_of(toys, mixed_toys, speeds, batch=batch)
    scorer = shares.scorer
    times = {
        division: scorer.step_time_ns(shares.mixed(division))
        for division in map(tuple, shares.divisions().tolist())
    }
    found = shares_of(toys, mixed_toys, speeds, batch=batch).search()
    assert min(times, key=times.__getitem__) == best
    assert found.ranked[0][0] == found.bound_ns == times[best] and found.space == len(times)
    assert tuple(pipeline.batch for pipeline in found.ranked[0][1].pipelines) == best


def test_only_shares_that_may_be_faster_are_searched(toys, mixed_toys):
    """64 samples, one device 3 times as fast: 16 and 48."""
    shares = shares_of(toys, mixed_toys, [1, 3], batch=64)
    best_ns, best = shares.search().ranked[0]
    assert [pipeline.batch for pipeline in best.pipelines] == [16, 48]
    assert shares.is_known(0, 16) and not shares.is_known(0, 40)
    limited = shares_of(toys, mixed_toys, [1, 3], batch=64).search(limit_ns=best_ns)
    assert limited.ranked[0][0] == limited.bound_ns == best_ns
    quicker = shares_of(toys, mixed_toys, [1, 3], batch=64).search(limit_ns=best_ns // 2)
    assert quicker.ranked == () and quicker.bound_ns == best_ns // 2


def test_shares_that_are_not_searched_count_with_their_bounds(toys, mixed_toys):
    found = shares_of(toys, mixed_toys, [1, 3], batch=64).search(most_searched=1)
    best_ns = shares_of(toys, mixed_toys, [1, 3], batch=64).search().ranked[0][0]
    assert found.ranked == () and found.bound_ns <= best_ns


def test_what_fits_nowhere_is_no_share(toys, mixed_toys):
    shares = shares_of(toys, mixed_toys, [1, 3], batch=4, tensor_bytes=10)
    assert shares.search().ranked == () and shares.fits_nowhere(0, 4) is not None


@pytest.mark.parametrize(
    "batch, grain", [(6, 1), (64, 1), (128, 2), (96, 1), (97, 1), (512, 8), (1536, 16), (257, 257)]
)
def test_a_grain_is_a_64th_of_the_batch_or_less(toys, mixed_toys, batch, grain):
    assert shares_of(toys, mixed_toys, [1, 2], batch=batch).grain == grain


def test_a_kind_alone_has_the_best_plan_of_its_own_devices(toys, mixed_toys):
    shares = shares_of(toys, mixed_toys, [1, 2], batch=6)
    slow, fast = shares.alone(0, 6), shares.alone(1, 6)
    assert slow is not None and fast is not None
    assert slow[0] == pytest.approx(2 * fast[0], rel=1e-3)
    assert shares.alone(0, 5, limit_ns=1) is None and shares.least_ns(0, 5) > 1
