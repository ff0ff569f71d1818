"""Groups over nodes, compared with the ranks written out."""

from __future__ import annotations

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.placement import crosses_node, device_names, group_nodes, stride_of

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


def test_neighbouring_stages():
    pipeline = Candidate(pp=4, tp=2)
    assert [crosses_node(pipeline, stage, 4) for stage in range(3)] == [False, True, False]


def test_device_names_fill_nodes_in_order():
    assert device_names(Candidate(tp=3), [2, 2]) == ["0:0", "0:1", "1:0"]
