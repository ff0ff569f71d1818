"""The members of a group, and what of data parallelism is offered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.group_table import Group
from claw_plan.planner.members import Members, most_together
from claw_plan.profiles.trainers import load_trainers


def members(problem, fix, **base):
    group = Group(base=Candidate(**base), microbatches=2, size=0)
    return Members(problem, fix).of(group)


@pytest.mark.parametrize(("blocks", "most"), [(0, 1), (1, 1), (2, 2), (3, 2), (96, 4)])
def test_no_more_blocks_are_gathered_together_than_a_stage_has(blocks, most):
    assert most_together(blocks) == most


@pytest.mark.parametrize(("tp", "dp", "near"), [(1, 8, 4), (2, 8, 2), (4, 8, None), (1, 6, 2)])
def test_near_ranks_lie_within_a_node_of_four(toys, tp, dp, near):
    """The most that divide dp_shard and, with tp, the node; where parameters are freed."""
    problem = toys.problem(cluster=toys.cluster(nodes=8), global_batch=24)
    fix = {"dp_replicate": 1, "zero": 3, "blocks_per_group": 1, "offload": "none"}
    found = members(problem, fix, tp=tp, dp_replicate=dp)
    assert [c.reshard_ranks for c in found] == [0, *([near] if near else [])]
    kept = members(problem, fix | {"zero": 2}, tp=tp, dp_replicate=dp)
    assert [c.reshard_ranks for c in kept] == [0]


def test_pinned_numbers_may_be_others(toys):
    problem = toys.problem(cluster=toys.cluster(nodes=3), global_batch=24)
    found = members(problem, {"reshard_ranks": 6, "blocks_per_group": 3}, dp_replicate=12)
    assert {(c.dp_shard, c.zero, c.reshard_ranks, c.blocks_per_group) for c in found} == {
        (12, 3, 6, 3)
    }
    assert members(problem, {"reshard_ranks": 5}, dp_replicate=12) == []


def test_what_is_not_sharded_is_not_gathered(toys):
    """Replicas, and trainers that keep a copy of the parameters in the compute precision."""
    problem = toys.problem(cluster=toys.cluster(nodes=3))
    replicas = members(problem, {"dp_shard": 1}, dp_replicate=8)
    copies = members(
        replace(problem, trainer=load_trainers()["megatron-core"]), {}, dp_replicate=8
    )
    for candidate in (*replicas, *copies):
        assert (candidate.reshard_ranks, candidate.blocks_per_group) == (0, 1)
    assert replicas and any(candidate.dp_shard > 1 for candidate in copies)


def test_a_pinned_order_with_shards_before_replicas_has_no_hybrid(toys):
    problem = toys.problem(toys.graph(layers=4), toys.cluster(nodes=2), precision="bfloat16")
    order = ("dp_shard", "dp_replicate", "pp", "cp", "tp")
    found = members(problem, {"mesh_order": order}, dp_replicate=4, mesh_order=order)
    assert {(c.dp_replicate, c.dp_shard) for c in found} == {(4, 1), (1, 4)}
    assert {c.mesh_order for c in found} == {order}
