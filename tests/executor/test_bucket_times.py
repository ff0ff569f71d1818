"""Ready times of a chain: last layer first, as many as there are parameters."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from claw_plan.executor.bucket_times import record_next, record_ready
from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.ranks import Rank


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False))


def test_the_last_layer_is_ready_first_and_nothing_is_left_behind(alone: Rank) -> None:
    module = chain()
    found = record_ready(
        module, lambda: module(torch.ones(1, 3)).sum().backward(), 3, dist.group.WORLD
    )
    assert found.numels == (8, 4, 12)
    assert 0 < found.ready_ns[0] < min(found.ready_ns[1:])
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in module.parameters())


def test_the_median_of_repeats_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One gradient; each call reads the clock when it starts and when the gradient comes."""
    clock = iter([0, 7, 100, 103, 200, 290])
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(clock))
    module = nn.Linear(1, 1, bias=False)
    found = record_ready(module, lambda: module(torch.ones(1, 1)).sum().backward(), 3)
    assert found.ready_ns == (7,)


def test_a_gradient_that_never_comes_is_named() -> None:
    module = chain()
    with pytest.raises(ExecutionError, match=r"no backward reached 2\.weight"):
        record_ready(module, lambda: module[0](torch.ones(1, 3)).sum().backward(), 1)


def test_the_first_layer_is_needed_first(alone: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock: start, a read for each parameter as it is entered, forward's end, and updates."""
    clock = iter([0, 10, 11, 30, 45, 100, 124])
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(clock))
    module = chain()
    found = record_next(module, lambda: module(torch.ones(1, 3)).sum().backward(), list, 1)
    # Parameters from the last: 8, 4 and 12 elements.
    assert found.needed_ns == (30, 11, 10)
    assert found.forward_ns == 45
    assert found.update_ns == (8, 4, 12)
