"""Groups: which ranks are a node, what is refused, and that every strategy adds up."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from claw_plan.executor.communication.algorithms import NAMES
from claw_plan.executor.communication.group import create_group, nodes_of
from claw_plan.executor.errors import ExecutionError


def test_ranks_of_a_host_are_a_node() -> None:
    assert nodes_of(["a", "b", "a", "c"]) == ((0, 2), (1,), (3,))


@pytest.mark.slow
def test_all_strategies_of_one_group_add_up(on_four_ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(on_four_ranks):
        seen = found["groups"]
        assert seen["nodes"] == [[0, 1], [2, 3]]
        assert seen["sums"] == {name: [10.0] * 5 for name in NAMES}
        assert seen["around"] == [10.0] * 5
        assert seen["gathered"] == [4.0 * number for number in range(8)]
        assert seen["mean"] == [1.5, 2.0]
        assert seen["pair"] == ([4.0] if rank in (1, 3) else None)


def test_a_group_needs_ranks_that_have_met() -> None:
    with pytest.raises(ExecutionError, match="call init_process_group first"):
        create_group("ring")


def test_mistakes_are_named() -> None:
    with pytest.raises(ExecutionError, match="did you mean 'hierarchical'"):
        create_group("hierarchic")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ExecutionError, match="hosts names each of the 1 ranks, but got 2"):
            create_group("ring", hosts=["a", "b"])
        group = create_group("ring")
        assert group is not None
        with pytest.raises(ExecutionError, match="names the group's 1 ranks once each"):
            group.ordered([1])
        assert group.using("tree").strategy == "tree"
    finally:
        dist.destroy_process_group()
