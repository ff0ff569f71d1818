"""The inner size of experts is found by trial; divided, they give together what they gave."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from claw_plan.planner.expert_parallel import find_experts
from claw_plan.planner.expert_tensor_parallel import (
    divide_experts,
    tensor_rule,
    with_inner_size,
)
from claw_plan.planner.graph import ExpertRule
from claw_plan.planner.tensor_parallel import TensorParallelModel
from claw_plan.planner.tp_autograd import StandIn

_spec = importlib.util.spec_from_file_location(
    "expert_modules", Path(__file__).with_name("expert_modules.py")
)
assert _spec is not None and _spec.loader is not None
kinds: ModuleType = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(kinds)

HIDDEN, INNER = 16, 20


def rule_of(inner: torch.nn.Module, divides: int = 2) -> ExpertRule:
    model = kinds.Model(kinds.Block(inner))
    found = find_experts(model, ["block"], lambda: model(torch.randn(10, HIDDEN)), 5)
    [rule] = found.rules["block"]
    return with_inner_size(rule, inner, found.calls["block.inner"], divides)


def test_gate_and_up_are_two_pieces_of_the_inner_size() -> None:
    rule = rule_of(kinds.Fused())
    assert (rule.inner, rule.weight_dims) == (INNER, (("up", 1), ("down", 2)))


def test_where_they_take_turns_experts_stay_whole() -> None:
    assert rule_of(kinds.Interleaved()).inner == 0


def test_a_size_that_a_degree_does_not_divide_stays_whole() -> None:
    assert rule_of(kinds.Fused(), divides=8).inner == 0


def test_lists_stay_whole() -> None:
    assert rule_of(kinds.Listed()).inner == 0


@pytest.mark.parametrize("degree", [2, 4])
def test_one_all_reduce_forward_and_two_backward(degree: int) -> None:
    """10 tokens of 16 floats there and back, and the gradients of their 2 weights."""
    block = kinds.Block(kinds.Fused())
    model = kinds.Model(block)
    seen: list[tuple[str, int]] = []
    ranks = StandIn(degree, exchange=lambda op, size, where: seen.append((op, size)))
    applied = TensorParallelModel(ranks=ranks)
    rule = tensor_rule(rule_of(block.inner))
    divide_experts(model, {"block": [rule]}, applied)
    assert tuple(block.inner.up.shape) == (6, 2 * INNER // degree, HIDDEN)
    assert tuple(block.inner.down.shape) == (6, HIDDEN, INNER // degree)
    result = model(torch.randn(10, HIDDEN, requires_grad=True))
    assert seen == [("all_reduce", 10 * HIDDEN * 4)]
    result.sum().backward()
    assert sorted(seen[1:]) == [("all_reduce", 10 * 2 * 4), ("all_reduce", 10 * HIDDEN * 4)]
    applied.remove()
    assert tuple(block.inner.down.shape) == (6, HIDDEN, INNER)


def test_parts_add_up_to_the_whole() -> None:
    torch.manual_seed(0)
    whole = kinds.Fused()
    rule = tensor_rule(rule_of(whole))
    hidden = torch.randn(10, HIDDEN)
    weights, index = torch.rand(10, 6).topk(2)
    total = torch.zeros_like(hidden)
    for rank in range(4):
        own = kinds.Fused()
        own.load_state_dict(whole.state_dict())
        applied = TensorParallelModel(ranks=StandIn(4, rank))
        divide_experts(kinds.Model(kinds.Block(own)), {"block": [rule]}, applied)
        total += own(hidden, index, weights)
    torch.testing.assert_close(total, whole(hidden, index, weights), rtol=1e-4, atol=1e-4)


def test_along_a_divided_sequence_tokens_are_gathered_and_scattered() -> None:
    block = kinds.Block(kinds.Fused())
    seen: list[tuple[str, int]] = []
    ranks = StandIn(2, exchange=lambda op, size, where: seen.append((op, size)))
    applied = TensorParallelModel(
        ranks=ranks, sequence_parallel_parameters=("block.router.weight", "block.inner.up")
    )
    rule = tensor_rule(rule_of(block.inner))
    model = kinds.Model(block)
    divide_experts(model, {"block": [rule]}, applied, sequence_parallel=True)
    assert applied.sequence_parallel_parameters == ("block.router.weight",)
    assert model(torch.randn(10, HIDDEN)).shape == (10, HIDDEN)
    # Hidden states, indices (int64) and weights of 20 tokens, then 20 results.
    assert seen == [
        ("all_gather", 20 * HIDDEN * 4),
        ("all_gather", 20 * 2 * 8),
        ("all_gather", 20 * 2 * 4),
        ("reduce_scatter", 20 * HIDDEN * 4),
    ]
