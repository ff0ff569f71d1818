"""Processes that measure together: what is said when they do not (test_benchmark_gloo answers).

What they run is found by name in new processes, so builtins stand in for measurements.
"""

from __future__ import annotations

import os

import pytest

from claw_plan.executor.benchmark_processes import measure_together
from claw_plan.executor.errors import ExecutionError


@pytest.mark.slow
def test_one_that_fails_is_named_by_its_exit_code() -> None:
    with pytest.raises(ExecutionError, match="ended with exit code 1; see its message above"):
        measure_together(os.getpid, 1, (), num_answers=1, timeout_s=120, advice="-")


@pytest.mark.slow
def test_those_that_do_not_answer_are_given_up() -> None:
    with pytest.raises(ExecutionError, match=r"2 processes could not measure .* in time; try ag"):
        measure_together(print, 2, (), num_answers=1, timeout_s=8, advice="try again")
