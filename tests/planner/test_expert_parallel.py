"""Which modules are experts that ranks can share: by what they hold, how they are called."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.planner.expert_parallel import (
    ExpertCall,
    ExpertFinding,
    ExpertList,
    find_experts,
    hold_part,
)
from claw_plan.planner.graph import ExpertRule

_spec = importlib.util.spec_from_file_location(
    "expert_modules", Path(__file__).with_name("expert_modules.py")
)
assert _spec is not None and _spec.loader is not None
kinds: ModuleType = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(kinds)

TOKENS = 10


def found_in(inner: torch.nn.Module, *, by_name: bool = False) -> ExpertFinding:
    """What a model with a block of a router and this module holds; a batch has 5 samples."""
    model = kinds.Model(kinds.Block(inner, by_name=by_name))
    return find_experts(model, ["block"], lambda: model(torch.randn(TOKENS, kinds.HIDDEN)), 5)


@pytest.mark.parametrize("by_name", [False, True])
def test_experts_in_common_tensors_are_found(by_name: bool) -> None:
    """10 tokens of 5 samples have 2 experts each: 4 rows a sample, of 16 floats."""
    assert found_in(kinds.Fused(), by_name=by_name).rules == {
        "block": (ExpertRule(
            module="inner", experts=6, counted_by=("number",), rows_per_sample=4, row_bytes=64,
        ),)
    }  # fmt: skip


def test_so_are_lists_of_modules() -> None:
    [rule] = found_in(kinds.Listed()).rules["block"]
    assert (rule.experts, rule.listed, rule.counted_by) == (6, "each", ())


@pytest.mark.parametrize(
    ("inner", "why"),
    [
        (kinds.WeightedInside(), "its forward gives other numbers"),
        (kinds.RoutingItself(), "its modules are called one by one"),
    ],
)
def test_what_cannot_be_shared_is_refused(inner: torch.nn.Module, why: str) -> None:
    found = found_in(inner)
    assert not found.rules
    assert why in found.refused["block"]


def test_convolutions_are_no_experts() -> None:
    assert found_in(kinds.Convolved()) == ExpertFinding()


def test_nothing_runs_where_nothing_holds_experts() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))

    def fails() -> None:
        raise AssertionError

    assert find_experts(model, ["0"], fails, 2) == ExpertFinding()


@settings(deadline=None)
@given(parts=st.sampled_from([1, 2, 3, 6]), seed=st.integers(0, 100))
def test_parts_give_together_what_the_whole_gives(parts: int, seed: int) -> None:
    torch.manual_seed(seed)
    whole = kinds.Listed() if seed % 2 else kinds.Fused()
    rule = ExpertRule(
        module="inner", experts=6, counted_by=() if seed % 2 else ("number",),
        listed="each" if seed % 2 else "",
    )  # fmt: skip
    hidden = torch.randn(TOKENS, kinds.HIDDEN)
    weights, index = torch.rand(TOKENS, 6).topk(2)
    expected = whole(hidden, index, weights)
    total = torch.zeros_like(hidden)
    for part in range(parts):
        own = kinds.Listed() if seed % 2 else kinds.Fused()
        own.load_state_dict(whole.state_dict())
        kept = hold_part(own, rule, part, parts)
        here = (index >= kept.start) & (index < kept.stop)
        total += own(hidden, torch.where(here, index - kept.start, 0), weights * here)
    torch.testing.assert_close(total, expected)


def test_a_part_of_a_list_keeps_the_names_of_the_whole() -> None:
    whole = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(4))
    part = ExpertList(whole, 2, 4)
    assert [name for name, _ in part.named_children()] == ["2", "3"]
    assert part[0] is whole[2]
    assert len(part) == 2


@pytest.mark.parametrize(
    "tensors",
    [
        (torch.zeros(4, 8), torch.zeros(4, 2)),
        (torch.zeros(4, 8), torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 3)),
        (torch.zeros(5, 8), torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 2)),
    ],
)
def test_other_calls_are_no_calls_of_experts(tensors: tuple[torch.Tensor, ...]) -> None:
    assert ExpertCall.read(tensors, {}) is None
