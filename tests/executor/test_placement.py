from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.placement import check_count, displaced, ranks_per_node
from claw_plan.executor.ranks import Rank
from claw_plan.planner.plan import Plan, load_plan


@pytest.fixture
def on(tiny_plan: Callable[..., Path]) -> Callable[..., Plan]:
    """The plan of four ranks with these devices."""

    def placed(*devices: str) -> Plan:
        plan = load_plan(tiny_plan("placed", dp_shard=4))
        mesh = plan.mesh.model_copy(update={"devices": list(devices)})
        return plan.model_copy(update={"mesh": mesh})

    return placed


def test_ranks_are_counted_host_by_host(on: Callable[..., Plan]) -> None:
    assert ranks_per_node(on("0:0", "0:1", "1:0", "1:1")) == [2, 2]
    assert ranks_per_node(on("0:3", "1:0", "1:1", "1:2")) == [1, 3]
    with pytest.raises(ExecutionError, match="one node in several places"):
        ranks_per_node(on("0:0", "1:0", "0:1", "1:1"))


def test_wrong_counts_say_how_many_to_start(on: Callable[..., Plan]) -> None:
    rank = Rank(rank=0, world_size=3, local_rank=0, local_world_size=3)
    with pytest.raises(ExecutionError, match="trains on 4 ranks, but 3 were started"):
        check_count(on("0:0", "0:1", "1:0", "1:1"), rank)


def test_ranks_on_other_hosts_than_planned_are_named(on: Callable[..., Plan]) -> None:
    plan = on("0:0", "0:1", "1:0", "1:1")
    assert displaced(plan, ["a", "a", "b", "b"]) == ""
    assert "ranks 0 and 1 on one host, but they are on a and b" in displaced(plan, list("abab"))
    assert "0 and 2 on different hosts, but both are on a" in displaced(plan, list("aaaa"))
