from __future__ import annotations

import sys
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


FAULTY = """
import sys
import torch
from claw_plan.executor import worker
from claw_plan.executor.parallel_model import ParallelModel

step = ParallelModel.train_step

def faulty_step(self, batch):
    self.steps = getattr(self, "steps", 0) + 1
    loss = step(self, batch)
    name = "transformer.h.2.mlp.c_fc.weight"
    if self.steps == 2 and torch.distributed.get_rank() == 1:
        with torch.no_grad():
            parameter = self.parameters[name]
            getattr(parameter, "_local_tensor", parameter)[1, 2] += 1e-3
    return loss

ParallelModel.train_step = faulty_step
worker.run(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_fault_of_one_rank_in_one_step_is_named_and_so_is_what_was_left_out(
    tiny_plan: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, text = tmp_path / "faulty.py", tmp_path / "text"
    script.write_text(FAULTY)
    text.write_bytes(bytes(index % 61 for index in range(2000)))
    worker = [sys.executable, str(script)]
    plans = [tiny_plan("faulty-replica", dp_replicate=2), tiny_plan("faulty-shard", dp_shard=2)]
    replica, shard = verify_plans(plans, steps=3, data=text, worker=worker)
    for result in (replica, shard):
        assert not result.ok
        said = str(result.first_difference)
        assert said.startswith("transformer.h.2.mlp.c_fc.weight on rank 1 alone after step 2: 1.0")
        assert "code that asks for its rank" in said
    monkeypatch.setattr("claw_plan.executor.verify.blocks_to_keep", lambda plan, number: 2)
    [smaller] = verify_plans([tiny_plan("fewer", pp=2)], steps=2)
    assert smaller.ok and smaller.blocks == 2
