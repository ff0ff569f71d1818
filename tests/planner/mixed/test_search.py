"""The best pipeline over unlike devices against every pipeline simulated."""

from __future__ import annotations

import random

import pytest

from claw_plan.planner.mixed.search import search_mixed
from claw_plan.planner.mixed.space import MixedSpace


def random_space(toys, mixed_toys, seed: int) -> MixedSpace:
    """Two kinds, or three of single devices, some with hardly any memory."""
    rng = random.Random(seed)
    several = rng.choice([2, 2, 3])
    kinds = [
        mixed_toys.ToyKind(
            devices=1 if several == 3 else rng.choice([1, 2]),
            flops_per_s=rng.choice([5e5, 1e6, 2e6, 3e6]) + number,
            tensor_bytes=rng.choice([1 << 30, 20_000, 12_000, 8000]),
            nic_bytes_per_s=rng.choice([1e5, 1e6]),
        )
        for number in range(several)
    ]
    hidden, is_tied = rng.choice([0, 100]), rng.random() < 0.5
    graph = toys.graph(layers=rng.randint(2, 3), hidden=hidden, tied=is_tied, heads=2)
    return MixedSpace(mixed_toys.mixed_scorer(toys, kinds, global_batch=2, graph=graph))


@pytest.mark.parametrize("seed", range(8))
def test_it_finds_the_best_of_all_orders_cuts_and_divisions(toys, mixed_toys, seed):
    space = random_space(toys, mixed_toys, seed)
    scorer = space.scorer
    times = [
        scorer.step_time_ns(mixed)
        for mixed in mixed_toys.every_pipeline(space)
        if scorer.fits(mixed)
    ]
    found = search_mixed(space)
    assert [ns for ns, _ in found.ranked[:1]] == ([min(times)] if times else [])
    if times:
        best_ns, best = found.ranked[0]
        assert found.bound_ns == best_ns == scorer.step_time_ns(best)


def roomy_space(toys, mixed_toys) -> MixedSpace:
    kinds = [mixed_toys.ToyKind(devices=1), mixed_toys.ToyKind(devices=1, flops_per_s=2e6)]
    graph = toys.graph(layers=3, hidden=10)
    return MixedSpace(mixed_toys.mixed_scorer(toys, kinds, global_batch=4, graph=graph))


def test_what_is_not_looked_at_counts_with_its_bound(toys, mixed_toys):
    best_ns = search_mixed(roomy_space(toys, mixed_toys)).ranked[0][0]
    stopped = search_mixed(roomy_space(toys, mixed_toys), limit_ns=10**12, most_opened=3)
    assert stopped.bound_ns < best_ns and not stopped.ranked


def test_nothing_is_simulated_that_cannot_beat_what_is_known(toys, mixed_toys):
    found = search_mixed(roomy_space(toys, mixed_toys), limit_ns=1)
    assert not found.ranked and found.bound_ns == 1
