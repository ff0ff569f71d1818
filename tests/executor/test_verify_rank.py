from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from claw_plan.executor.job import VERIFY, Job, Progress
from claw_plan.executor.ranks import Rank
from claw_plan.executor.verify_rank import (
    Difference,
    first_difference,
    largest,
    result_path,
    verify_on_rank,
)


def test_what_left_the_tolerance_first_is_named() -> None:
    good, bad = {"a": 1e-16, "b": 0.0}, {"a": 1e-16, "b": 1e-3}
    worse = {"a": 2e-3, "b": 1e-3}
    everywhere = [[good, worse, worse], [good, bad, worse], [{"a": 0.0}] * 3]
    assert first_difference(everywhere, 1e-10) == Difference(
        step=2, rank=0, parameter="a", difference=2e-3, ranks=1, holders=3
    )
    assert first_difference([[good], [good]], 1e-10) is None
    missing = first_difference([[good], [{"b": float("nan")}]], 1e-10)
    assert missing is not None and (missing.rank, missing.parameter) == (1, "b")
    assert largest([1.0, float("nan"), 2.0]) != largest([1.0, 2.0])


def test_one_rank_compares_itself(
    tiny_plan: Callable[..., Path], alone: Rank, tmp_path: Path
) -> None:
    plans = (tiny_plan("a"), tiny_plan("b", recompute="full"))
    job = Job(kind=VERIFY, folder=tmp_path, plans=plans, steps=1)
    verify_on_rank(job, alone, Progress())
    for index in range(2):
        found = json.loads(result_path(tmp_path, index).read_text())
        assert set(found) == {"float64", "float32"}
        assert found["float64"]["max_loss_diff"] < 1e-14
        assert found["float64"]["max_param_diff"] == 0.0
        assert (found["float64"]["first"], found["float64"]["reason"]) == (None, "")
    # Both train the same, so one process's results are made once a precision.
    assert len(list(tmp_path.glob("reference_*"))) == 2
