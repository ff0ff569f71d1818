"""What fully_shard's hooks see of divided tensors; training itself is in test_parity_context."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from claw_plan.executor.context_parallel import _open_around_hooks
from claw_plan.planner.candidate import ALL_GATHER
from claw_plan.planner.context_parallel_division import sequence_division
from claw_plan.planner.context_parallel_ranks import ContextStandIn
from claw_plan.planner.head_shard import HeadShard


class Both(nn.Module):
    """Two hidden states in, in a dict, and what it saw of them."""

    seen: list[bool]

    def forward(self, x: torch.Tensor, *, more: dict[str, Any]) -> tuple[Any, ...]:
        self.seen = [isinstance(t, HeadShard) for t in (x, more["y"], more["whole"])]
        return x + more["y"], more["whole"], "kept"


def test_hooks_see_local_parts_and_the_module_and_its_caller_divided_tensors() -> None:
    module, seen = Both(), list[tuple[int, ...]]()
    module.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(args[0].shape)), with_kwargs=True
    )
    module.register_forward_hook(lambda module, args, out: seen.append(tuple(out[0].shape)))
    _open_around_hooks(module)
    division = sequence_division(ALL_GATHER, ContextStandIn(2))
    x, y = (division.held(torch.ones(3, 4), 1) for _ in range(2))
    for _ in range(2):  # nothing is left over from the first call
        total, whole, kept = module(x, more={"y": y, "whole": torch.ones(5)})
        assert seen == [(3, 4), (3, 4)]
        assert module.seen == [True, True, False]
        assert isinstance(total, HeadShard) and total.shape == (3, 8)
        assert torch.equal(total.local, torch.full((3, 4), 2.0))
        assert (tuple(whole.shape), kept) == ((5,), "kept")
        seen.clear()


def test_gradients_hooks_on_what_leaves_a_module_fire() -> None:
    """fully_shard gathers parameters for backward when the gradient of an output comes."""
    module, fired = nn.Linear(2, 2), list[tuple[int, ...]]()

    def watch(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        out.register_hook(lambda gradient: fired.append(tuple(gradient.shape)))

    module.register_forward_hook(watch)
    _open_around_hooks(module)
    division = sequence_division(ALL_GATHER, ContextStandIn(2))
    out = module(division.held(torch.ones(3, 4, 2), 1))
    out.sum().backward()
    assert fired == [(3, 4, 2)]
    assert module.weight.grad is not None
