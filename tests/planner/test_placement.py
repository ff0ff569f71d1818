"""Groups over nodes, compared with the ranks written out."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.placement import (
    crosses_node,
    device_names,
    expert_groups,
    group_nodes,
    groups_of,
    outcome,
    replica_nodes,
    shard_nodes,
    stage_hosts,
    stride_of,
    tp_nodes,
)
from claw_plan.planner.score import Scorer
from claw_plan.planner.supported import refusal

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


AXES = ("pp", "dp_replicate", "dp_shard", "tp")


@given(st.tuples(*[st.integers(1, 4)] * 4), st.permutations(AXES), st.integers(1, 9))
def test_nodes_of_groups_as_the_ranks_lie(degrees, order, per_node):
    candidate = Candidate(**dict(zip(AXES, degrees, strict=True)), mesh_order=("cp", *order))
    places = list(product(*(range(getattr(candidate, name)) for name in order)))
    for axis, name in enumerate(order):
        nodes: dict[tuple[int, ...], set[int]] = {}
        for rank, place in enumerate(places):
            group = place[:axis] + place[axis + 1 :]
            nodes.setdefault(group, set()).add(rank // per_node)
        assert group_nodes(candidate, name, per_node) == max(map(len, nodes.values()))
    assert tp_nodes(candidate, per_node) == group_nodes(candidate, "tp", per_node)
    axis = order.index("pp")
    for stage in range(candidate.pp):
        after = (stage + 1) % candidate.pp
        pairs = (
            (rank, places.index((*place[:axis], after, *place[axis + 1 :])))
            for rank, place in enumerate(places)
            if place[axis] == stage
        )
        crosses = any(own // per_node != peer // per_node for own, peer in pairs)
        assert crosses_node(candidate, stage, per_node) == crosses


@settings(deadline=None, max_examples=30)
@given(st.tuples(*[st.integers(1, 3)] * 4), st.integers(1, 4), st.sampled_from(["cuda", "cpu"]))
def test_orders_of_one_outcome_make_the_same_step(toys, degrees, per_node, kind):
    """All orders of the axes, simulated; heads divide by 1 and 2, or 3."""
    base = Candidate(**dict(zip(AXES, degrees, strict=True)))
    assume(not refusal(base))
    nodes = -(-base.num_devices // per_node)
    cluster = toys.cluster(nodes=nodes, devices=per_node, kind=kind)
    problem = toys.problem(toys.graph(layers=4, heads=6), cluster, global_batch=2 * base.dp)
    scorer, times = Scorer(problem), {}
    for order in permutations(AXES):
        candidate = replace(base, mesh_order=("cp", *order))
        found = outcome(candidate, per_node, by_host=kind == "cpu")
        path = scorer.bounds.stage_path(candidate)
        times.setdefault(found, set()).add(scorer.step_time_ns(candidate, path.cuts))
    assert all(len(each) == 1 for each in times.values())


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
