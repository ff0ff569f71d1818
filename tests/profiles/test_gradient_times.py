"""Ready times that are none."""

from __future__ import annotations

import pytest

from claw_plan.profiles.gradient_times import GradientTimes


@pytest.mark.parametrize("times", [{}, {"weight": -1}])
def test_each_parameter_has_a_time_from_0_on(times: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="a time from 0 on"):
        GradientTimes(device="cpu-core", microbatch_size=1, ready_ns=times)
