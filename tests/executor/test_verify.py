from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from claw_plan.executor.verify import verify_plan, verify_plans
from claw_plan.planner.errors import PlanError


@pytest.mark.slow
def test_a_right_plan_is_told_apart_by_rounding_only(tiny_plan: Callable[..., Path]) -> None:
    result = verify_plan(tiny_plan("right", dp_shard=2), steps=2)
    assert result.ok and result.steps == 2
    assert result.first_difference is None
    assert result.fp64_max_param_diff < 1e-12
    assert result.fp32_max_loss_diff < 1e-5


def test_plans_of_different_sizes_are_not_verified_together(
    tiny_plan: Callable[..., Path],
) -> None:
    with pytest.raises(PlanError, match=r"equally many devices, but got \[1, 2\]"):
        verify_plans([tiny_plan("one"), tiny_plan("two", tp=2)])
    with pytest.raises(PlanError, match="at least one step"):
        verify_plans([tiny_plan("one")], steps=0)
