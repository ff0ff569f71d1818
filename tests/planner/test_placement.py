"""Groups over nodes, compared with the ranks written out."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.placement import (
    crosses_node,
    device_names,
    expert_groups,
    group_nodes,
    groups_of,
    replica_nodes,
    shard_nodes,
    stage_hosts,
    stride_of,
)

WIDE = Candidate(pp=2, dp_replicate=2, dp_shard=2, tp=4)  # 32 ranks


def test_strides_follow_the_mesh_order():
    strides = {axis: stride_of(WIDE, axis) for axis in WIDE.mesh_order}
    assert strides == {"pp": 16, "dp_replicate": 8, "dp_shard": 4, "cp": 4, "tp": 1}


@pytest.mark.parametrize(
    "axis, per_node, nodes",
    [
        ("tp", 8, 1),  # ranks 0-3
        ("dp_shard", 8, 1),  # ranks 0, 4
        ("dp_replicate", 8, 2),  # ranks 0, 8
        ("dp_replicate", 16, 1),
        ("pp", 16, 2),  # ranks 0, 16
        ("tp", 2, 2),  # ranks 0-3 on nodes 0 and 1
        ("tp", 6, 2),  # ranks 4-7 straddle nodes of six
    ],
)
def test_nodes_of_groups(axis, per_node, nodes):
    assert group_nodes(WIDE, axis, per_node) == nodes


@given(st.tuples(*[st.integers(1, 4)] * 4), st.integers(1, 9))
def test_nodes_of_groups_as_the_ranks_lie(degrees, per_node):
    candidate = Candidate(
        **dict(zip(("pp", "dp_replicate", "dp_shard", "tp"), degrees, strict=True))
    )
    places = list(product(*map(range, degrees)))
    for axis, name in enumerate(("pp", "dp_replicate", "dp_shard", "tp")):
        nodes: dict[tuple[int, ...], set[int]] = {}
        for rank, place in enumerate(places):
            group = place[:axis] + place[axis + 1 :]
            nodes.setdefault(group, set()).add(rank // per_node)
        assert group_nodes(candidate, name, per_node) == max(map(len, nodes.values()))
    stage_ranks = len(places) // candidate.pp
    for stage in range(candidate.pp):
        ranks = range(stage * stage_ranks, (stage + 1) * stage_ranks)
        crosses = any(r // per_node != (r + stage_ranks) % len(places) // per_node for r in ranks)
        assert crosses_node(candidate, stage, per_node) == crosses


def test_neighbouring_stages():
    pipeline = Candidate(pp=4, tp=2)
    assert [crosses_node(pipeline, stage, 4) for stage in range(3)] == [False, True, False]


def test_device_names_fill_nodes_in_order():
    assert device_names(Candidate(tp=3), [2, 2]) == ["0:0", "0:1", "1:0"]


@pytest.mark.parametrize(
    ("candidate", "per_node", "nodes"),
    [
        (Candidate(dp_replicate=2, dp_shard=8), 8, 2),
        (Candidate(dp_replicate=8, dp_shard=2), 8, 2),
        (Candidate(pp=2, dp_replicate=2, cp=2, tp=2), 8, 1),
        (Candidate(dp_replicate=2, cp=2, tp=4), 8, 2),
    ],
)
def test_replicas_span_the_nodes_of_dp_and_cp_together(candidate, per_node, nodes):
    assert replica_nodes(candidate, per_node) == nodes


@pytest.mark.parametrize(
    ("candidate", "per_node", "groups"),
    [
        # Ranks 0-7 of a stage share 4 experts' parts on neighbours: {0..3}, {4..7}; same: {0, 4}.
        (Candidate(dp_shard=8, ep=4), 8, ((4, 1), (2, 1))),
        (Candidate(dp_shard=8, ep=4), 4, ((4, 1), (2, 2))),
        # Each expert over two ranks: ep groups are every other rank of eight.
        (Candidate(dp_shard=4, tp=2, ep=4, etp=2), 4, ((4, 2), (1, 1))),
        # Stages are apart: ep does not cross them.
        (Candidate(pp=2, dp_shard=4, ep=4), 4, ((4, 1), (1, 1))),
    ],
)
def test_experts_lie_on_neighbours(candidate, per_node, groups):
    assert expert_groups(candidate, per_node) == groups


def test_groups_beside_tensor_parallelism():
    both = Candidate(dp_shard=2, cp=2, tp=2, ep=4)
    assert groups_of(both, 4) == (("cp", 2, 1), ("ep", 4, 1))
    assert groups_of(Candidate(dp_shard=8, tp=2), 4) == ()


def test_the_last_stage_sends_to_the_first():
    assert [crosses_node(Candidate(pp=4), stage, 2) for stage in range(4)] == [
        False, True, False, True,
    ]  # fmt: skip


def test_shard_groups_count_the_contexts():
    assert shard_nodes(Candidate(dp_shard=4, cp=2, tp=2), 8) == 2
    assert shard_nodes(Candidate(dp_shard=4, tp=2), 8) == 1


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        (Candidate(pp=4), [((0, 1),), ((0, 1),), ((1, 1),), ((1, 1),)]),
        (Candidate(pp=2, dp_replicate=2), [((0, 2),), ((1, 2),)]),
        (Candidate(pp=2, dp_replicate=3), [((0, 2), (1, 1)), ((1, 1), (2, 2))]),
        (Candidate(dp_replicate=4), [((0, 2), (1, 2))]),
        (Candidate(dp_replicate=3), [((0, 2), (1, 1))]),
        (
            Candidate(pp=2, tp=2, mesh_order=("tp", "pp", "dp_replicate", "dp_shard", "cp")),
            [((0, 1), (1, 1)), ((0, 1), (1, 1))],
        ),
    ],
)
def test_a_stage_lies_on_the_hosts_of_its_ranks(candidate, expected):
    """Two devices a host, filled in the order of the mesh."""
    assert [stage_hosts(candidate, stage, 2) for stage in range(candidate.pp)] == expected
