"""Sums after the last backward; and that each is missed, loudly, when it is left out."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from claw_plan.executor.gradients import (
    buckets,
    local_gradient,
    reduce_gradients,
    share_of_mean,
)
from claw_plan.executor.ranks import Rank
from claw_plan.executor.verify import verify_plans


def test_buckets_close_once_they_are_full_and_hold_one_dtype() -> None:
    sizes = [torch.zeros(3), torch.zeros(3), torch.zeros(1), torch.zeros(2).double()]
    found = [[tensor.numel() for tensor in bucket] for bucket in buckets(sizes, 20)]
    assert found == [[3, 3], [1], [2]]


def test_one_tensor_larger_than_a_bucket_is_a_bucket() -> None:
    assert [len(b) for b in buckets([torch.zeros(100), torch.zeros(1)], 8)] == [1, 1]
    assert list(buckets([], 8)) == []


def test_a_parameter_nothing_reached_has_a_gradient_of_zeros() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert torch.equal(local_gradient(parameter), torch.zeros(2))
    assert parameter.grad is not None


def test_what_no_rank_reached_is_left_without_a_gradient(alone: Rank) -> None:
    reached, unreached = (nn.Parameter(torch.ones(3)) for _ in range(2))
    reached.grad = torch.full((3,), 2.0)
    group = dist.group.WORLD
    assert group is not None
    reduce_gradients([unreached, reached], group, dist.ReduceOp.SUM, 1000)
    assert unreached.grad is None
    assert torch.equal(reached.grad, torch.full((3,), 2.0))


def test_shares_of_the_mean_add_up_to_it() -> None:
    losses = torch.tensor([1.0, 2.0, 6.0])
    assert sum(share_of_mean(loss, 3) for loss in losses) == losses.mean()


FAULTS = {
    "tied gradients not summed": (
        "gradients.TiedGradients.add_up = lambda self: None",
        {"pp": 2},
        r"transformer\.wte\.weight on rank [01] after step 1",
    ),
    "norms of a divided sequence not summed": (
        "from claw_plan.executor import rank_stages\n"
        "divide = rank_stages.divide_weights\n"
        "def forgetful(*given):\n"
        "    divided = divide(*given)\n"
        "    divided.sequence_parallel_parameters = ()\n"
        "    return divided\n"
        "rank_stages.divide_weights = forgetful",
        {"tp": 2, "sequence_parallel": True},
        r"on rank [01] after step 1",
    ),
    "sum of microbatches in place of their mean": (
        "parallel_model.share_of_mean = lambda loss, count: loss",
        {"dp_shard": 2},
        r"on rank [01] after step 1",
    ),
    "the same in a pipeline": (
        "parallel_model.share_of_mean = lambda loss, count: loss",
        {"pp": 2},
        r"on rank [01] after step 1",
    ),
    "a tied table counted twice in the norm": (
        "gradients.TiedGradients.is_first_holder = lambda self, name: True",
        {"pp": 2, "clip_norm": 0.5},
        r"on rank [01] after step 1",
    ),
    "copies of tensor-parallel ranks counted in the norm": (
        "parallel_model.divided_as = lambda compiled, name: name",
        {"tp": 2, "clip_norm": 0.5},
        r"on rank [01] after step 1",
    ),
    "each rank clips by its own norm": (
        "import torch\n"
        "parallel_model.global_norm = lambda counted, device: torch.stack(\n"
        "    [p.grad.to_local().norm() for p in counted]).norm()",
        {"dp_shard": 2, "clip_norm": 0.5},
        r"on rank [01] after step 1",
    ),
    "gradients that add up whole never scattered": (
        "from claw_plan.executor import microbatches\n"
        "microbatches._say_to_shards = lambda module, zero, is_last: (\n"
        "    module.set_requires_gradient_sync(False))",
        {"dp_shard": 2, "zero": 1},
        r"on rank [01] after step 1",
    ),
    "the second end of a tied table on one rank left out": (
        "from claw_plan.executor.rank_stages import TiedCopy\n"
        "def forget(self):\n"
        "    self.copy.grad = None\n"
        "TiedCopy.give_gradient = forget",
        {"pp": 2, "stages_per_rank": 2, "schedule": "ZBVZeroBubble"},
        r"transformer\.wte\.weight on rank 0 after step 1",
    ),
    "torch's own split of a backward through shards": (
        "from torch.distributed.pipelining import PipelineStage\n"
        "from claw_plan.executor import pipeline\n"
        "pipeline.RecordedStage.backward_maybe_with_nosync = (\n"
        "    lambda self, *a, **kw: PipelineStage.backward_maybe_with_nosync(self, *a, **kw))",
        {"pp": 2, "dp_shard": 2, "stages_per_rank": 2, "schedule": "ZBVZeroBubble"},
        r"on rank [0-3] after step 1",
    ),
    "replicas of a pipeline not reduced": (
        "parallel_model.reduce_gradients = lambda *given: None",
        {"pp": 2, "dp_replicate": 2},
        r"on rank [0-3] after step 1",
    ),
}
"""What is left out -> (how, under which plan, the difference that `verify` must name)."""


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_each_silent_fault_is_seen_by_verify(
    fault: str, tiny_plan: Callable[..., Path], tmp_path: Path
) -> None:
    change, knobs, difference = FAULTS[fault]
    script = tmp_path / "faulty_worker.py"
    script.write_text(
        "import sys\n"
        "from claw_plan.executor import gradients, parallel_model, worker\n"
        f"{change}\n"
        "worker.run(sys.argv[1:])\n"
    )
    plan = tiny_plan(fault.replace(" ", "-"), **knobs)
    [result] = verify_plans([plan], steps=2, worker=(sys.executable, str(script)))
    assert not result.ok
    assert result.first_difference is not None

    assert re.search(difference, result.first_difference), result.first_difference
    assert result.fp64_max_param_diff > 1e-7
