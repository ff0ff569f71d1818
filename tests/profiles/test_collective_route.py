from __future__ import annotations

from dataclasses import replace

import pytest

from claw_plan.profiles import catalogue
from claw_plan.profiles.cluster import Link, Network, Node
from claw_plan.profiles.collective_route import Route, route
from claw_plan.profiles.work import CollectiveWork

NODE = Node(
    type="test",
    device=catalogue.device("h100"),
    device_count=8,
    intra=Link(name="l", bytes_per_s=400e9, latency_ns=500, source="test"),
    nic=Link(name="n", bytes_per_s=50e9, latency_ns=5000, source="test"),
    nic_count=4,
    host_memory_bytes=1,
    host_cores=1,
)


def of(
    ranks: int, nodes: int, concurrent: int = 0, op: str = "all_reduce", **node: object
) -> Route:
    work = CollectiveWork(op=op, bytes=1, group_size=ranks, nodes=nodes, concurrent=concurrent)
    return route(replace(NODE, **node), Network(latency_ns=100), work)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "concurrent", "nics", "per_rank"),
    [
        (2, 0, 4, 0.5),  # one rank a node, all eight devices talk
        (2, 8, 4, 0.5),
        (2, 1, 4, 1.0),  # alone: the NIC nearest to it
        (2, 1, 16, 2.0),  # alone: the NICs that are its own
        (8, 1, 4, 1.0),  # four ranks a node and four NICs
        (16, 1, 4, 0.5),
        (8, 2, 4, 0.5),
        (8, 9, 4, 0.5),  # no more talk than there are devices
    ],
)
def test_ranks_that_talk_share_the_nics(
    ranks: int, concurrent: int, nics: int, per_rank: float
) -> None:
    assert of(ranks, 2, concurrent, nic_count=nics).nics == per_rank


def test_the_network_adds_to_hops_and_takes_from_rates() -> None:
    work = CollectiveWork(op="all_reduce", bytes=1, group_size=4, nodes=4)
    got = route(NODE, Network(latency_ns=100, oversubscription=2.0), work)
    assert (got.inter_hop_ns, got.intra_hop_ns) == (5100, 500)
    assert got.inter_rate("all_reduce") == 50e9 * 4 / 8 / 2
    assert (got.ranks, got.nodes, got.local) == (4, 4, 1)


def test_directly_joined_devices_use_the_links_to_their_peers() -> None:
    mesh = replace(NODE.intra, peer_links=7, group_share={4: 0.5})
    assert of(8, 1, intra=mesh).intra_rate("all_reduce") == 400e9
    assert of(3, 1, intra=mesh).intra_rate("all_reduce") == 200e9
    assert of(2, 1, op="all_to_all", intra=mesh).intra_rate("all_to_all") == 400e9 / 7
    assert of(2, 1).intra_rate("all_to_all") == 400e9
