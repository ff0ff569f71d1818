"""A training under failures, by hand and by its law."""

from __future__ import annotations

import pytest

from claw_plan.simulator.errors import SimulationError
from claw_plan.simulator.failures import training_time


def test_without_failures_only_checkpoints_are_added():
    """10 of work in pieces of 4, 4, 2, each with a checkpoint of 1."""
    assert training_time(10, 4, 1, 5, 1e12, 0) == 13


def test_failures_cost_time_and_the_same_seed_gives_the_same():
    one, again, other = (training_time(1000, 10, 1, 5, 50, seed) for seed in (1, 1, 2))
    assert one == again != other
    assert one > 1000 * 11 / 10


def test_what_never_ends_is_refused():
    with pytest.raises(SimulationError, match="has not ended"):
        training_time(10, 10, 1, 1, 1e-3, 0)
