from __future__ import annotations

import math

import pytest

from claw_plan.profiles.cluster import Network
from claw_plan.profiles.cluster_file import load_cluster
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
    assert cost("all_reduce", 4, 2).latency_ns == 530_000
    assert cost("all_reduce", 4, 4).latency_ns == 3 * 530_000
    assert cost("send", 4, 2).latency_ns == 129_000


def test_between_hosts_the_nics_carry_it() -> None:
    got = cost("all_gather", 1 << 30, 2, 2)
    assert (got.link, got.bytes) == ("inter", 1 << 29)
