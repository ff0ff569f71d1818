from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.profiles import catalogue
from claw_plan.profiles.cluster import Link, Network, Node
from claw_plan.profiles.cluster_file import load_cluster
from claw_plan.profiles.collective_cost import analytic_collective
from claw_plan.profiles.cost import CollectiveCost
from claw_plan.profiles.work import COLLECTIVE_OPS, CollectiveWork

HOP_NS, RATE = 500, 300e9
NIC_HOP_NS, NIC_RATE = 5000, 50e9

NODE = Node(
    type="test",
    device=catalogue.device("h100"),
    device_count=8,
    intra=Link(name="l", bytes_per_s=RATE, latency_ns=HOP_NS, source="test"),
    nic=Link(name="n", bytes_per_s=NIC_RATE, latency_ns=NIC_HOP_NS, source="test"),
    nic_count=4,
    host_memory_bytes=1,
    host_cores=1,
)
SHARE = NIC_RATE * 4 / 8


def cost(
    op: str,
    size: int,
    ranks: int,
    nodes: int = 1,
    *,
    algorithm: str = "auto",
    node: Node = NODE,
    network: Network | None = None,
    backend: str = "nccl",
) -> CollectiveCost:
    work = CollectiveWork(
        op=op, bytes=size, group_size=ranks, nodes=nodes, algorithm=algorithm, backend=backend
    )
    return analytic_collective(node, network or Network(), work)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("size", [8, 8 << 10, 8 << 30])
def test_ring_closed_forms_inside_a_node(ranks: int, size: int) -> None:
    """all_reduce 2(n-1)(a + S/(nB)); all_gather and reduce_scatter half of it."""
    step_ns = HOP_NS + size / ranks / RATE * 1e9
    for algorithm in ("auto", "ring"):
        all_reduce = cost("all_reduce", size, ranks, algorithm=algorithm)
        assert all_reduce.alone_ns == math.ceil(round(2 * (ranks - 1) * step_ns, 3))
        assert all_reduce.link == "intra"
        for op in ("all_gather", "reduce_scatter"):
            assert cost(op, size, ranks).alone_ns == math.ceil(round((ranks - 1) * step_ns, 3))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_pipelined_tree_inside_a_node(ranks: int) -> None:
    """2 log2(n) a + 2 S/B."""
    size = 1 << 30
    expected = 2 * math.log2(ranks) * HOP_NS + 2 * size / RATE * 1e9
    assert cost("all_reduce", size, ranks, algorithm="tree").alone_ns == math.ceil(expected)


def test_bus_bandwidth_of_long_messages_is_the_plateau() -> None:
    """nccl-tests: busbw = S/t * 2(n-1)/n for all_reduce, (n-1)/n for the others."""
    node = load_cluster("dgx-a100-80gb").nodes[0]
    size = 1 << 34
    for op, factor, plateau in (("all_reduce", 2.0, 227e9), ("all_gather", 1.0, 220e9)):
        seconds = cost(op, size, 8, node=node).alone_ns / 1e9
        assert size / seconds * factor * 7 / 8 == pytest.approx(plateau, rel=2e-3)


def test_ring_between_nodes_uses_all_rails_of_its_ranks() -> None:
    # 16 ranks on 2 nodes: a node sends 2 * 15/16 S over its 4 NICs, an eighth of it a device.
    size = 1 << 30
    got = cost("all_reduce", size, 16, 2, algorithm="ring")
    assert got.link == "inter"
    assert got.bytes == 2 * 15 * size // 16 // 8
    assert got.rate_cap_bytes_per_s == SHARE
    assert got.latency_ns == 2 * (14 * HOP_NS + 1 * NIC_HOP_NS)


def test_one_rank_a_node_has_its_share_of_the_nics() -> None:
    size = 1 << 30
    got = cost("all_gather", size, 4, 4)
    assert got.rate_cap_bytes_per_s == SHARE
    assert got.bytes == 3 * size // 4
    assert got.latency_ns == 3 * NIC_HOP_NS


def test_the_slower_link_carries_the_flow() -> None:
    fast = replace(NODE, nic=replace(NODE.nic, bytes_per_s=600e9))
    got = cost("all_reduce", 1 << 30, 16, 2, algorithm="ring", node=fast)
    assert got.link == "intra"
    assert got.bytes == 2 * 15 * (1 << 30) // 16


def test_tree_between_nodes() -> None:
    got = cost("all_reduce", 1 << 30, 64, 8, algorithm="tree")
    assert got.latency_ns == 2 * (3 * NIC_HOP_NS + 7 * HOP_NS)
    assert got.bytes == 2 * (1 << 30) // 8


def test_hierarchical_is_the_sum_over_the_levels() -> None:
    """Reduce-scatter inside on S, all-reduce between on S/8, all-gather inside on S."""
    size = 1 << 30
    inside_ns = 2 * 7 * (HOP_NS + size / 8 / RATE * 1e9)
    between_ns = 2 * 3 * (NIC_HOP_NS + size / 8 / 4 / SHARE * 1e9)
    got = cost("all_reduce", size, 32, 4, algorithm="hierarchical")
    assert got.alone_ns == pytest.approx(inside_ns + between_ns, abs=2)
    # Inter-node bytes per node are 2 M (R-1)/R for R nodes, whatever the ranks a node.
    assert got.bytes * 8 == 2 * size * 3 // 4


def test_auto_is_the_faster_of_ring_and_tree() -> None:
    small, large = 1 << 10, 1 << 32
    for size in (small, large):
        both = [
            cost("all_reduce", size, 512, 64, algorithm=name).alone_ns for name in ("ring", "tree")
        ]
        assert cost("all_reduce", size, 512, 64).alone_ns == min(both)
    assert (
        cost("all_reduce", small, 512, 64, algorithm="tree").alone_ns
        < cost("all_reduce", small, 512, 64, algorithm="ring").alone_ns
    )


def test_send_is_one_message() -> None:
    assert cost("send", 1 << 20, 2).alone_ns == math.ceil(HOP_NS + (1 << 20) / RATE * 1e9)
    between = cost("send", 1 << 20, 2, 2)
    assert (between.link, between.latency_ns) == ("inter", NIC_HOP_NS)
    assert between.rate_cap_bytes_per_s == SHARE
    many = replace(NODE, nic_count=32)
    assert cost("send", 1 << 20, 2, 2, node=many).rate_cap_bytes_per_s == NIC_RATE


def test_the_network_slows_what_leaves_the_node() -> None:
    network = Network(type="fat-tree", oversubscription=2.0, latency_ns=3000)
    got = cost("all_gather", 1 << 30, 4, 4, network=network)
    assert got.rate_cap_bytes_per_s == SHARE / 2
    assert got.latency_ns == 3 * (NIC_HOP_NS + 3000)


@pytest.mark.parametrize("ranks", [2, 4])
def test_gloo_moves_the_bytes_that_interface_counters_saw(ranks: int) -> None:
    """Bytes sent per rank over S, torch 2.13, 2 and 4 ranks; broadcast: the root's."""
    node = load_cluster("cpu").nodes[0]
    size = 1 << 24
    seen = {
        "all_reduce": 2 * (ranks - 1) / ranks,
        "reduce_scatter": 2 * (ranks - 1) / ranks,
        "all_gather": (ranks - 1) / ranks,
        "all_to_all": (ranks - 1) / ranks,
        "broadcast": math.log2(ranks),
        "send": 1,
    }
    for op, share in seen.items():
        assert cost(op, size, ranks, node=node, backend="gloo").bytes == share * size


def test_gloo_starts_slowly() -> None:
    node = load_cluster("cpu").nodes[0]
    assert cost("all_reduce", 4, 2, node=node, backend="gloo").latency_ns == 530_000
    assert cost("all_reduce", 4, 4, node=node, backend="gloo").latency_ns == 3 * 530_000
    assert cost("send", 4, 2, node=node, backend="gloo").latency_ns == 129_000


def test_a_group_of_one_costs_nothing() -> None:
    for op in COLLECTIVE_OPS:
        assert cost(op, 1 << 30, 1).alone_ns == 0


GROUPS = st.sampled_from([(2, 1), (3, 1), (8, 1), (2, 2), (16, 2), (12, 3), (512, 64)])


@given(
    st.sampled_from(COLLECTIVE_OPS),
    st.sampled_from(["auto", "ring", "tree", "hierarchical"]),
    st.sampled_from(["nccl", "gloo"]),
    GROUPS,
    st.integers(1, 1 << 36),
    st.integers(0, 1 << 36),
)
def test_positive_and_never_cheaper_by_growing(
    op: str, algorithm: str, backend: str, group: tuple[int, int], size: int, more: int
) -> None:
    small = cost(op, size, *group, algorithm=algorithm, backend=backend)
    large = cost(op, size + more, *group, algorithm=algorithm, backend=backend)
    assert 0 < small.alone_ns <= large.alone_ns
    assert small.rate_cap_bytes_per_s > 0
    assert small.link in ("intra", "inter")


@given(st.sampled_from(COLLECTIVE_OPS), st.integers(1, 1 << 36), st.integers(1, 5))
def test_larger_groups_never_cost_less(op: str, size: int, doublings: int) -> None:
    small = cost(op, size, 1 << doublings, algorithm="ring")
    large = cost(op, size, 2 << doublings, algorithm="ring")
    assert small.alone_ns <= large.alone_ns
