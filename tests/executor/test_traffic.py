"""The counter sees Python's collectives and C++'s, each once, and leaves nothing behind."""

from __future__ import annotations

import torch
import torch.distributed as dist

from claw_plan.executor.ranks import Rank
from claw_plan.executor.torch_private import watch_dispatched
from claw_plan.executor.traffic import METHODS, REDUCER, TrafficCounter
from claw_plan.planner.traffic import Kind, Moved


def test_methods_are_counted_by_group_and_put_back(alone: Rank, monkeypatch) -> None:
    before = {name: vars(dist.ProcessGroup).get(name) for name in METHODS}
    world = dist.group.WORLD
    counter = TrafficCounter({world.group_name: "tp"})
    monkeypatch.setattr(dist.ProcessGroup, "size", lambda group: 2)
    with counter.counting(sees_reducer=True):
        dist.all_reduce(torch.zeros(3))
        dist.all_reduce(torch.zeros(2, dtype=torch.float64))
        dist.broadcast(torch.zeros(1), 0)
    assert counter.take() == {
        Kind("all_reduce", "tp", 2): Moved(2, 3 * 4 + 2 * 8),
        Kind("broadcast", "tp", 2): Moved(1, 4),
    }
    assert counter.take() == {}
    assert {name: vars(dist.ProcessGroup).get(name) for name in METHODS} == before
    dist.all_reduce(torch.zeros(3))
    assert counter.take() == {}


def test_calls_that_python_does_not_make_are_seen_at_the_dispatcher(alone: Rank) -> None:
    seen = []
    world = dist.group.WORLD
    with watch_dispatched(REDUCER, lambda op, args: seen.append((op, args[0][0].nbytes))):
        value = torch.ones(5)
        world.allreduce([value]).wait()
    world.allreduce([value]).wait()
    assert seen == [("all_reduce", 20)]
    assert value.tolist() == [1.0] * 5


def test_a_group_of_one_moves_nothing(alone: Rank) -> None:
    counter = TrafficCounter({})
    with counter.counting(sees_reducer=False):
        dist.all_reduce(torch.zeros(3))
    assert counter.take() == {}
