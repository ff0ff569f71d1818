"""Bounds of unlike pipelines are below their simulation, and close."""

from __future__ import annotations

from itertools import islice

import pytest

from claw_plan.planner.mixed.bound import MixedBounds
from claw_plan.planner.mixed.space import MixedSpace


@pytest.mark.parametrize("slow_nic", [1e4, 1e6])
def test_no_bound_exceeds_its_simulation(toys, mixed_toys, slow_nic):
    kinds = [
        mixed_toys.ToyKind(nic_bytes_per_s=slow_nic),
        mixed_toys.ToyKind(flops_per_s=2.5e6),
    ]
    scorer = mixed_toys.mixed_scorer(toys, kinds, global_batch=8)
    space, bounds = MixedSpace(scorer), MixedBounds(scorer)
    ratios = []
    for mixed in islice(mixed_toys.every_pipeline(space), 0, None, 19):
        bound_ns, step_ns = bounds.step_ns(mixed), scorer.step_time_ns(mixed)
        assert bound_ns <= step_ns
        ratios.append(bound_ns / step_ns)
    assert len(ratios) > 50 and max(ratios) > 0.95
