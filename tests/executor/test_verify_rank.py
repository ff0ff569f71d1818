from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from claw_plan.executor.job import VERIFY, Job, Progress
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import compile_plan
from claw_plan.executor.ranks import Rank
from claw_plan.executor.verify_rank import result_path, verify_on_rank, whole_parameters


def test_sharded_parameters_come_out_whole(tiny_plan: Callable[..., Path], alone: Rank) -> None:
    plan, loaded = open_plan(tiny_plan("whole-parameters", precision="bfloat16"))
    compiled = compile_plan(plan, loaded, torch.device("cpu"))
    torch.manual_seed(plan.training.seed)
    expected = dict(loaded.build().named_parameters())
    found = dict(whole_parameters(compiled))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_one_rank_compares_itself(
    tiny_plan: Callable[..., Path], alone: Rank, tmp_path: Path
) -> None:
    plans = (tiny_plan("a"), tiny_plan("b", recompute="full"))
    job = Job(kind=VERIFY, folder=tmp_path, plans=plans, steps=1)
    verify_on_rank(job, alone, Progress())
    for index in range(2):
        found = json.loads(result_path(tmp_path, index).read_text())
        assert set(found) == {"float64", "float32"}
        assert found["float64"] == {"max_loss_diff": 0.0, "max_param_diff": 0.0, "first": None}
    # Both train the same, so one process's results are made once a precision.
    assert len(list(tmp_path.glob("reference_*"))) == 2
