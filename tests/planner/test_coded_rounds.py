"""Means through codecs by messages, against the closed forms of their rounds."""

from __future__ import annotations

import pytest

from claw_plan.planner.coded_rounds import exchanges_by
from claw_plan.profiles.codecs import describe_codec

A_NS, B_NS = 5_000, 1_000
"""The toy's start of a message, and its time for a byte inside a node; between nodes ten times."""

INT8 = describe_codec("int8")
PART = 1024 + 4 * 4
"""Codes of a quarter of 4096 elements."""


@pytest.mark.parametrize("algorithm, rounds", [("ring", 3), ("halving_doubling", 2)])
def test_four_ranks_of_a_node(toys, algorithm, rounds):
    """Three messages of a part, straight; then three parts come, in as many rounds or fewer."""
    found = exchanges_by(toys.problem(), algorithm, INT8, 4096, 4, 1)
    assert (found.ranks, found.elements, found.inside) == (4, 4096, None)
    assert found.exchange.alone_ns == pytest.approx(3 * (A_NS + PART * B_NS), abs=20)
    assert found.gather.alone_ns == pytest.approx(rounds * A_NS + 3 * PART * B_NS, abs=20)
    (work,) = found.exchange.moves
    assert (work.op, work.bytes, work.algorithm) == ("all_reduce", 4 * 4096, algorithm)
    assert found.gather.moves == ()


def test_between_nodes_ranks_of_a_node_share_what_they_send(toys):
    """Two nodes of two. In the turns 1 and 3 one rank of a node sends to the other, in 2 both."""
    problem = toys.problem(cluster=toys.cluster(nodes=2, devices=2))
    found = exchanges_by(problem, "ring", INT8, 4096, 4, 2)
    assert found.exchange.alone_ns == pytest.approx(3 * (A_NS + PART * 10 * B_NS), abs=20)
    assert (found.exchange.link, found.exchange.bytes) == ("inter", 2 * PART)  # (1 + 2 + 1) / 2
    assert found.gather.bytes == -(-3 * PART // 2)


def test_a_hierarchy_encodes_a_part_of_each_nodes_sum(toys):
    """Two nodes of two: half the elements whole to a neighbour; of the other half codes between.

    Each of the two nodes then serves a quarter, as both ranks of a node do at once.
    """
    problem = toys.problem(cluster=toys.cluster(nodes=2, devices=2))
    found = exchanges_by(problem, "hierarchical", INT8, 4096, 4, 2)
    assert (found.ranks, found.elements) == (2, 2048)
    assert found.inside is not None
    assert found.inside.alone_ns == pytest.approx(A_NS + 4 * 2048 * B_NS, abs=20)
    for cost in (found.exchange, found.gather):
        assert cost.alone_ns == pytest.approx(A_NS + PART * 10 * B_NS, abs=20)
        assert (cost.link, cost.bytes) == ("inter", PART)


def test_of_one_rank_each_a_hierarchy_is_a_ring(toys):
    problem = toys.problem(cluster=toys.cluster(nodes=4, devices=1))
    ring, both = (
        exchanges_by(problem, algorithm, INT8, 4096, 4, 4)
        for algorithm in ("ring", "hierarchical")
    )
    assert both.inside is None
    assert both.exchange.alone_ns == ring.exchange.alone_ns
    assert both.gather.alone_ns == ring.gather.alone_ns


def test_on_gloo_a_round_waits_for_the_word_too(toys):
    problem = toys.problem(cluster=toys.cluster(kind="cpu"))
    found = exchanges_by(problem, "ring", INT8, 4096, 4, 1)
    assert found.exchange.latency_ns == found.gather.latency_ns == 3 * 2 * A_NS
