"""NCCL's algorithms in closed form: with neutral constants they are the textbook's."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from claw_plan.profiles import catalogue
from claw_plan.profiles.cluster import Link, Network, Node
from claw_plan.profiles.collective_constants import Library, Protocol
from claw_plan.profiles.collective_cost import analytic_collective
from claw_plan.profiles.cost import CollectiveCost
from claw_plan.profiles.nccl_cost import LL_PEER_BYTES
from claw_plan.profiles.work import CollectiveWork

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

FILLS = ("ring ll", "ring ll128", "ring simple", "tree", "nvls", "nvls_tree", "all_to_all", "send")
NEUTRAL = Library(
    name="neutral",
    launch_ns=0.0,
    piece_ns=0.0,
    drain=0.0,
    exchange_ns=0.0,
    fill=dict.fromkeys(FILLS, 0.0),
    protocols={name: Protocol(name=name) for name in ("ll", "ll128", "simple", "nvls")},
)


def cost(
    op: str,
    size: int,
    ranks: int,
    nodes: int = 1,
    *,
    algorithm: str = "auto",
    node: Node = NODE,
    network: Network | None = None,
    library: Library = NEUTRAL,
) -> CollectiveCost:
    work = CollectiveWork(op=op, bytes=size, group_size=ranks, nodes=nodes, algorithm=algorithm)
    return analytic_collective(node, network or Network(), work, library)


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


def test_ring_between_nodes_uses_all_rails_of_its_ranks() -> None:
    # 16 ranks on 2 nodes: a node sends 2 * 15/16 S over its 4 NICs, an eighth of it a device.
    size = 1 << 30
    got = cost("all_reduce", size, 16, 2, algorithm="ring")
    assert (got.link, got.algorithm) == ("inter", "ring")
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
    """A node of a double tree sends the buffer twice; of two nodes, once."""
    got = cost("all_reduce", 1 << 30, 64, 8, algorithm="tree")
    assert got.latency_ns == 2 * (3 * NIC_HOP_NS + 7 * HOP_NS)
    assert got.bytes == 2 * (1 << 30) // 8
    few = replace(NODE, nic_count=2)
    assert cost("all_reduce", 1 << 30, 16, 2, algorithm="tree", node=few).bytes == (1 << 30) // 8


def test_switches_that_reduce_take_the_buffer_once() -> None:
    node = replace(
        NODE, intra=replace(NODE.intra, nvls=True, achieved_bytes_per_s={"nvls": 250e9})
    )
    size = 1 << 30
    got = cost("all_reduce", size, 8, node=node)
    assert (got.algorithm, got.protocol) == ("nvls", "nvls")
    assert (got.bytes, got.rate_cap_bytes_per_s) == (size, 250e9)
    assert cost("all_reduce", size, 2, node=node).algorithm == "ring"
    assert cost("all_reduce", size, 8, node=node, algorithm="ring").algorithm == "ring"
    assert cost("all_gather", size, 8, node=node).algorithm == "ring"
    fast = replace(node, nic=replace(NODE.nic, bytes_per_s=400e9))
    assert cost("all_reduce", size, 16, 2, node=fast).algorithm == "nvls_tree"


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
    assert (between.link, between.latency_ns, between.bytes) == ("inter", NIC_HOP_NS, 1 << 20)
    assert between.rate_cap_bytes_per_s == SHARE
    many = replace(NODE, nic_count=32)
    assert cost("send", 1 << 20, 2, 2, node=many).rate_cap_bytes_per_s == NIC_RATE


def test_the_network_slows_what_leaves_the_node() -> None:
    network = Network(type="fat-tree", oversubscription=2.0, latency_ns=3000)
    got = cost("all_gather", 1 << 30, 4, 4, network=network)
    assert got.rate_cap_bytes_per_s == SHARE / 2
    assert got.latency_ns == 3 * (NIC_HOP_NS + 3000)


def test_all_to_all_sends_each_peer_its_part() -> None:
    got = cost("all_to_all", 8 << 30, 8)
    assert (got.bytes, got.latency_ns, got.protocol) == (7 << 30, HOP_NS, "simple")
    between = cost("all_to_all", 16 << 30, 16, 2)
    assert (between.link, between.bytes) == ("inter", 8 << 30)


def test_exchanges_of_no_power_of_two_idle() -> None:
    """Six ranks pair up over eight: a third more rounds."""
    size = 6 << 20
    seconds = 5 / 6 * size / RATE
    got = cost("all_to_all", size, 6)
    assert got.latency_ns == math.ceil(HOP_NS + seconds / 3 * 1e9)


def test_short_exchanges_use_ll() -> None:
    slow = replace(NEUTRAL, protocols=NEUTRAL.protocols | {"ll": Protocol(name="ll", rate=0.25)})
    limit = 8 * LL_PEER_BYTES
    assert cost("all_to_all", limit, 8, library=slow).protocol == "ll"
    above = cost("all_to_all", limit + 8, 8, library=slow)
    assert above.protocol == "simple"
    # Never less than what LL took at the limit.
    assert above.alone_ns == cost("all_to_all", limit, 8, library=slow).alone_ns


def test_every_constant_of_the_library_has_its_effect() -> None:
    size, rate_ns = 1 << 30, (1 << 30) / RATE * 1e9
    launch = replace(NEUTRAL, launch_ns=9000.0)
    assert cost("all_gather", size, 8, library=launch).latency_ns == 9000 + 7 * HOP_NS
    own = replace(NODE, intra=replace(NODE.intra, launch_ns=4000))
    assert cost("all_gather", size, 8, node=own, library=launch).latency_ns == 4000 + 7 * HOP_NS
    pieces = replace(NEUTRAL, piece_ns=100.0)
    assert cost("all_gather", size, 8, library=pieces).latency_ns == 800 + 7 * HOP_NS
    assert cost("all_reduce", size, 8, library=pieces).latency_ns == 14 * HOP_NS
    drained = replace(NEUTRAL, drain=0.5)
    assert cost("all_gather", size, 2, library=drained).rate_cap_bytes_per_s == RATE / 1.5
    exchange = replace(NEUTRAL, exchange_ns=10.0)
    assert cost("all_to_all", size, 8, library=exchange).latency_ns == HOP_NS + 490
    filled = replace(NEUTRAL, fill=NEUTRAL.fill | {"send": 1.0})
    whole = (math.sqrt(HOP_NS) + math.sqrt(rate_ns)) ** 2
    assert cost("send", size, 2, library=filled).alone_ns == pytest.approx(whole, abs=2)


def test_protocols_trade_latency_for_rate() -> None:
    quick = Protocol(name="ll", hop=0.5, rate=0.5)
    library = replace(NEUTRAL, protocols=NEUTRAL.protocols | {"ll": quick})
    assert cost("all_gather", 1 << 10, 8, library=library).protocol == "ll"
    assert cost("all_gather", 1 << 10, 8, library=library).latency_ns == 7 * HOP_NS // 2
    assert cost("all_gather", 1 << 30, 8, library=library).protocol != "ll"


def test_the_spread_is_that_of_the_size() -> None:
    library = replace(NEUTRAL, spread_small=0.2, spread_large=0.1)
    assert cost("all_gather", (1 << 20) - 1, 8, library=library).spread == 0.2
    assert cost("all_gather", 1 << 20, 8, library=library).spread == 0.1
