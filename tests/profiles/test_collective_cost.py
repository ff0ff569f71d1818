"""What every library's answer must hold to, with the fitted constants."""

from __future__ import annotations

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

NODE = Node(
    type="test",
    device=catalogue.device("h100"),
    device_count=64,
    intra=Link(name="l", bytes_per_s=300e9, latency_ns=500, source="test", nvls=True),
    nic=Link(name="n", bytes_per_s=50e9, latency_ns=5000, source="test"),
    nic_count=4,
    host_memory_bytes=1,
    host_cores=1,
)


def cost(
    op: str,
    size: int,
    ranks: int,
    nodes: int = 1,
    *,
    algorithm: str = "auto",
    node: Node = NODE,
    backend: str = "nccl",
) -> CollectiveCost:
    work = CollectiveWork(
        op=op, bytes=size, group_size=ranks, nodes=nodes, algorithm=algorithm, backend=backend
    )
    return analytic_collective(node, Network(), work)


def test_a_group_of_one_costs_nothing() -> None:
    for op in COLLECTIVE_OPS:
        assert cost(op, 1 << 30, 1).alone_ns == 0


def test_the_backend_and_the_device_choose_the_library() -> None:
    assert cost("all_reduce", 4, 2, backend="gloo").protocol == ""
    assert cost("all_reduce", 4, 2).protocol in ("ll", "ll128")
    amd = replace(NODE, device=catalogue.device("mi300x"))
    assert cost("all_gather", 4, 2, node=amd).latency_ns > cost("all_gather", 4, 2).latency_ns


GROUPS = st.sampled_from([(2, 1), (3, 1), (8, 1), (36, 1), (2, 2), (16, 2), (12, 3), (512, 64)])


@given(
    st.sampled_from(COLLECTIVE_OPS),
    st.sampled_from(["auto", "ring", "tree", "hierarchical"]),
    st.sampled_from(["nccl", "gloo"]),
    GROUPS,
    st.integers(1, 1 << 36),
    st.one_of(st.integers(0, 1 << 10), st.integers(0, 1 << 36)),
)
def test_positive_and_never_cheaper_by_growing(
    op: str, algorithm: str, backend: str, group: tuple[int, int], size: int, more: int
) -> None:
    small = cost(op, size, *group, algorithm=algorithm, backend=backend)
    large = cost(op, size + more, *group, algorithm=algorithm, backend=backend)
    assert 0 < small.alone_ns <= large.alone_ns
    assert small.rate_cap_bytes_per_s > 0
    assert small.link in ("intra", "inter")


@given(st.sampled_from(COLLECTIVE_OPS), GROUPS, st.integers(1, 1 << 36))
def test_never_faster_than_the_wire(op: str, group: tuple[int, int], size: int) -> None:
    """A rank of a node sends at least what the other nodes, or the others in its own, lack."""
    ranks, nodes = group
    share = NODE.nic_bytes_per_s_per_device
    if nodes > 1:
        port = 50e9 if op == "send" else share
        least = size if op == "send" else size * (nodes - 1) / nodes / (ranks // nodes)
        if op == "all_to_all":
            least = size * (ranks - ranks // nodes) / ranks
        assert cost(op, size, *group).alone_ns >= least / port * 1e9 - 1
    else:
        least = size if op in ("send", "broadcast") else size * (ranks - 1) / ranks
        assert cost(op, size, *group).alone_ns >= least / 300e9 * 1e9 - 1


@given(
    st.sampled_from([op for op in COLLECTIVE_OPS if op != "all_to_all"]),
    st.integers(1, 1 << 36),
    st.integers(1, 5),
)
def test_larger_groups_never_cost_less(op: str, size: int, doublings: int) -> None:
    """Not so for all-to-all: to more peers go shorter messages, side by side."""
    small = cost(op, size, 1 << doublings, algorithm="ring")
    large = cost(op, size, 2 << doublings, algorithm="ring")
    assert small.alone_ns <= large.alone_ns


@pytest.mark.parametrize(
    ("node_type", "op", "ranks", "gb_per_s"),
    [
        # Long messages, as published: github stas00/ml-engineering, network/README.md.
        ("dgx-a100-80gb", "all_reduce", 8, 235),
        ("dgx-h200", "all_gather", 8, 361),
        ("dgx-h200", "all_reduce", 4, 363),
        ("dgx-b200", "all_reduce", 8, 838),
    ],
)
def test_plateaus_of_published_bandwidths(
    node_type: str, op: str, ranks: int, gb_per_s: float
) -> None:
    node = load_cluster(node_type).nodes[0]
    size = 1 << 34
    seconds = cost(op, size, ranks, node=node).alone_ns / 1e9
    factor = (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks
    assert size / seconds * factor / 1e9 == pytest.approx(gb_per_s, rel=0.12)
