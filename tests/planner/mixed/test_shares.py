"""Shares of the batch by speed, against every division."""

from __future__ import annotations

import pytest

from claw_plan.planner.mixed.shares import Shares


def shares_of(toys, mixed_toys, ratio: float, *, batch: int) -> Shares:
    kinds = [mixed_toys.ToyKind(devices=1), mixed_toys.ToyKind(devices=1, flops_per_s=ratio * 1e6)]
    graph = toys.graph(layers=2, hidden=0, tied=False)
    return Shares(mixed_toys.mixed_scorer(toys, kinds, global_batch=batch, graph=graph))


def test_few_grains_are_all_divided(toys, mixed_toys):
    shares = shares_of(toys, mixed_toys, 2, batch=6)
    divisions = list(shares.candidates())
    assert divisions == [(first, 6 - first) for first in range(1, 6)]
    scorer = shares.scorer
    times = {one: scorer.step_time_ns(shares.mixed(one)) for one in divisions}
    assert min(times, key=times.__getitem__) == (2, 4)


def test_of_many_grains_only_the_way_to_the_best_is_looked_at(toys, mixed_toys):
    """64 samples, one device 3 times as fast: 16 and 48."""
    shares = shares_of(toys, mixed_toys, 3, batch=64)
    divisions = list(shares.candidates())
    assert divisions[-1] == (16, 48) and len(divisions) <= 3
    every = {(n, 64 - n): shares.slowest_ns((n, 64 - n)) for n in range(12, 21)}
    assert min(every, key=every.__getitem__) == (16, 48)


@pytest.mark.parametrize("batch, grain", [(6, 1), (64, 1), (128, 2), (96, 2), (97, 97)])
def test_a_grain_divides_the_batch_into_64_parts_or_fewer(toys, mixed_toys, batch, grain):
    assert shares_of(toys, mixed_toys, 2, batch=batch).grain == grain


def test_a_kind_alone_has_the_best_plan_of_its_own_devices(toys, mixed_toys):
    shares = shares_of(toys, mixed_toys, 2, batch=6)
    slow, fast = shares.alone(0, 6), shares.alone(1, 6)
    assert slow is not None and fast is not None
    assert slow[0] == pytest.approx(2 * fast[0], rel=1e-3)
