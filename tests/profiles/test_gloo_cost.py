from __future__ import annotations

import math

import pytest

from claw_plan.profiles.cluster import Network
from claw_plan.profiles.cluster_file import cluster_from_mapping, load_cluster
from claw_plan.profiles.collective_route import route
from claw_plan.profiles.cost import CollectiveCost
from claw_plan.profiles.gloo_cost import gloo_collective
from claw_plan.profiles.work import CollectiveWork


def cost(op: str, size: int, ranks: int, nodes: int = 1) -> CollectiveCost:
    work = CollectiveWork(op=op, bytes=size, group_size=ranks, nodes=nodes, backend="gloo")
    return gloo_collective(route(load_cluster("cpu").nodes[0], Network(), work), work)


@pytest.mark.parametrize("ranks", [2, 4])
def test_gloo_moves_the_bytes_that_interface_counters_saw(ranks: int) -> None:
    """Bytes sent per rank over S, torch 2.13, 2 and 4 ranks; broadcast: the root's."""
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
        assert cost(op, size, ranks).bytes == share * size


def test_gloo_starts_slowly() -> None:
    assert cost("all_reduce", 1024, 2).latency_ns == 530_000
    assert cost("all_to_all", 1024, 2).latency_ns == 303_000
    assert cost("send", 4, 2).latency_ns == 129_000
    # The smallest leave most segments empty.
    assert cost("all_reduce", 8, 2).latency_ns == 265_000
    assert cost("all_reduce", 8, 4).latency_ns == 3 * 265_000


def test_between_hosts_the_nics_carry_it() -> None:
    got = cost("all_gather", 1 << 30, 2, 2)
    assert (got.link, got.bytes) == ("inter", 1 << 29)
    # Of four ranks on two hosts each sends half of what it has to the other host.
    assert cost("all_to_all", 1 << 30, 4, 2).bytes == 1 << 29


HOP_NS, BYTES_PER_S = 600_000, 25_000_000
"""Of hosts behind 200 Mbit/s, as a message of 8 bytes between them lasted."""


def shaped(op: str, size: int, ranks: int) -> float:
    """Milliseconds between so many of these hosts, a rank each."""
    node = {
        "devices": {"type": "cpu", "cores": 1, "count": 1},
        "nics": {"name": "shaped", "bandwidth": "200 Mb/s", "latency": "0.6 ms"},
        "host": {"memory": "8 GiB", "cores": 1},
    }
    hosts = cluster_from_mapping({"name": "shaped", "nodes": [node]}, "test")
    work = CollectiveWork(op=op, bytes=size, group_size=ranks, nodes=ranks, backend="gloo")
    return gloo_collective(route(hosts.nodes[0], hosts.network, work), work).alone_ns / 1e6


@pytest.mark.parametrize(
    ("op", "size", "measured_ms"),
    [
        ("all_reduce", 4096, 7.34),
        ("all_reduce", 1 << 18, 22.6),
        ("all_reduce", 1 << 20, 70.2),
        ("all_gather", 4096, 3.76),
        ("all_gather", 1 << 20, 35.4),
        ("all_to_all", 1 << 16, 4.29),
        ("all_to_all", 1 << 18, 14.1),
        ("all_to_all", 1 << 20, 43.5),
    ],
)
def test_four_hosts_take_about_as_long_as_measured(op: str, size: int, measured_ms: float) -> None:
    assert shaped(op, size, 4) == pytest.approx(measured_ms, rel=0.1)


def played_ring_ms(passes: int, size: int, ranks: int) -> float:
    """A ring of equal ranks, segment by segment: all do the same, so that one stands for all.

    What leaves a rank, words and data, leaves it one after the other.
    """
    segment_ns = size / ranks / 2 / BYTES_PER_S * 1e9
    begin_ns = 0.0
    for _ in range(passes):
        arrived: list[float] = []
        way_out_ns = begin_ns
        for number in range(2 * (ranks - 1)):
            asks_ns = begin_ns if number < 2 else arrived[number - 2]
            # The neighbour asks at that time too, behind what is on its way out already.
            asked_ns = max(asks_ns, way_out_ns if number >= 2 and number % 2 == 0 else 0)
            way_out_ns = max(way_out_ns, asked_ns + HOP_NS) + segment_ns
            arrived.append(way_out_ns + HOP_NS)
        begin_ns = arrived[-1]
    return begin_ns / 1e6


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("size", [1 << 6, 1 << 14, 1 << 17, 1 << 22])
def test_a_ring_is_as_long_as_one_played_segment_by_segment(ranks: int, size: int) -> None:
    assert shaped("all_gather", size, ranks) == pytest.approx(
        played_ring_ms(1, size, ranks), rel=0.02
    )
    assert shaped("all_reduce", size, ranks) == pytest.approx(
        played_ring_ms(2, size, ranks), rel=0.02
    )


def test_an_all_to_all_waits_once_however_many_ranks_there_are() -> None:
    assert shaped("all_to_all", 64, 2) == pytest.approx(1.2, rel=0.01)
    assert shaped("all_to_all", 64, 16) == pytest.approx(1.2, rel=0.01)
    assert shaped("all_gather", 64, 16) == pytest.approx(15 * 1.2, rel=0.01)
