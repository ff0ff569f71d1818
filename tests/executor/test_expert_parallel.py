"""Shared experts in one process: what stands in a module's place, its gradients, its means.

That several ranks train like one is shown in test_parity_experts.py.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.expert_parallel import ExpertParallel, Spread
from claw_plan.executor.mesh import make_mesh
from claw_plan.executor.ranks import Rank
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.graph import ExpertRule
from claw_plan.planner.placement import EXPERT_REPLICATE, EXPERT_SHARD

_spec = importlib.util.spec_from_file_location(
    "expert_model", Path(__file__).with_name("expert_model.py")
)
assert _spec is not None and _spec.loader is not None
models: ModuleType = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)

HIDDEN, EXPERTS = 16, 4


def routed(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    weights, index = torch.rand(tokens, EXPERTS).topk(2)
    return torch.randn(tokens, HIDDEN, requires_grad=True), index, weights.requires_grad_()


def spread(kind: type[nn.Module]) -> tuple[nn.Module, Spread]:
    module = kind(EXPERTS)
    rule = ExpertRule(
        module="experts", experts=EXPERTS, listed="each" if kind is models.Listed else ""
    )
    group = dist.group.WORLD
    assert group is not None
    return module, Spread(module, rule, group)


@pytest.mark.parametrize("kind", [models.Fused, models.Listed])
def test_a_group_of_one_gives_what_the_module_gives(alone: Rank, kind: type[nn.Module]) -> None:
    module, around = spread(kind)
    hidden, index, weights = routed(20)
    given = [hidden, weights, *module.parameters()]
    expected = module(hidden, index, weights)
    wanted = torch.autograd.grad(expected.square().sum(), given)
    found = around(hidden, index, weights)
    torch.testing.assert_close(found, expected)
    assert not found._is_view()  # fully_shard hooks on to results, which views may lose
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), given), wanted)


@pytest.mark.parametrize("kind", [models.Fused, models.Listed])
def test_without_tokens_backward_goes_on_all_the_same(alone: Rank, kind: type[nn.Module]) -> None:
    """Common tensors get zeros, of which other ranks' tokens may make something; lists nothing."""
    module, around = spread(kind)
    hidden, index, weights = routed(0)
    result = around(hidden, index, weights)
    assert result.requires_grad
    result.sum().backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    if kind is models.Listed:
        assert gradients == [None] * len(gradients)
    else:
        assert all(g is not None and not g.any() for g in gradients)


def test_other_calls_than_planned_are_refused(alone: Rank) -> None:
    _, around = spread(models.Fused)
    hidden, index, _ = routed(4)
    with pytest.raises(
        ExecutionError, match="Fused was called otherwise than when it was planned"
    ):
        around(hidden, index)


def test_routers_that_choose_more_than_there_are_are_refused(alone: Rank) -> None:
    _, around = spread(models.Fused)
    hidden, index, weights = routed(4)
    with pytest.raises(ExecutionError, match=f"chose expert {EXPERTS} of {EXPERTS}"):
        around(hidden, torch.full_like(index, EXPERTS), weights)


class _Three:
    """Ranks of which three share experts, as far as a mean asks."""

    def __init__(self) -> None:
        self.mesh = init_device_mesh(
            "cpu", (1, 1), mesh_dim_names=(EXPERT_REPLICATE, EXPERT_SHARD)
        )

    def __getitem__(self, axis: str) -> object:
        return self

    def size(self) -> int:
        return 3

    def get_group(self, axis: str) -> dist.ProcessGroup:
        return self.mesh.get_group(axis)


def test_what_a_group_added_up_is_divided_by_its_size(alone: Rank) -> None:
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 6.0])
    experts = ExpertParallel(
        ranks=_Three(),  # type: ignore[arg-type]
        parameters={"w": weight},
        first={"w": 0},
        is_sharded=False,
        unreached=frozenset(),
    )
    experts.finish(1 << 20)
    assert weight.grad.tolist() == [1.0, 2.0]


def test_one_rank_shares_with_itself(alone: Rank) -> None:
    ranks = make_mesh(Candidate(), "cpu").experts(1)
    assert [ranks[axis].size() for axis in (EXPERT_REPLICATE, EXPERT_SHARD, "ep")] == [1, 1, 1]
