"""All-reduces by rounds of messages, against the closed forms of their algorithms."""

from __future__ import annotations

import pytest

from claw_plan.planner.message_rounds import added_bytes, all_reduce_by

A_NS, B_NS = 5_000, 1_000
"""The toy's start of a message, and its time for a byte inside a node; between nodes ten times."""


@pytest.mark.parametrize(
    ("algorithm", "rounds", "buffers"),
    [
        ("ring", 2 * 3, 2 * 3 / 4),
        ("tree", 2 * 2, 2 * 2),
        ("recursive_doubling", 2, 2),
        ("halving_doubling", 2 * 2, 2 * 3 / 4),
        ("hierarchical", 2 * 3, 2 * 3 / 4),  # of one node its ring
    ],
)
def test_four_ranks_of_a_node(toys, algorithm, rounds, buffers):
    """Thakur, Rabenseifner, Gropp 2005, sections 4.1 to 4.5."""
    cost = all_reduce_by(toys.problem(), algorithm, 4096, 4, 1)
    assert cost.link == "intra"
    assert cost.alone_ns == pytest.approx(rounds * A_NS + buffers * 4096 * B_NS, abs=20)
    (work,) = cost.moves
    assert (work.op, work.bytes, work.algorithm) == ("all_reduce", 4096, algorithm)


def test_between_nodes_one_rank_of_a_ring_sends_and_all_of_a_hierarchy(toys):
    """Two nodes of two: a ring sends 2 x 3/4 over the slow port of one rank.

    A hierarchy scatters and gathers inside, 2 x 1/2, and each rank sends 2 x 1/4 between.
    """
    problem = toys.problem(cluster=toys.cluster(nodes=2, devices=2))
    ring = all_reduce_by(problem, "ring", 4096, 4, 2)
    assert ring.alone_ns == pytest.approx(6 * A_NS + 1.5 * 4096 * 10 * B_NS, abs=20)
    # Two ranks of a node share what it sends.
    assert (ring.link, ring.bytes) == ("inter", 1.5 * 4096 / 2)
    both = all_reduce_by(problem, "hierarchical", 4096, 4, 2)
    expected = 2 * A_NS + 4096 * B_NS + 2 * A_NS + 4096 / 2 * 10 * B_NS
    assert both.alone_ns == pytest.approx(expected, abs=20)


def test_on_gloo_a_round_waits_for_the_word_too(toys):
    cost = all_reduce_by(toys.problem(cluster=toys.cluster(kind="cpu")), "ring", 4096, 4, 1)
    assert cost.latency_ns == 6 * 2 * A_NS


def test_a_tree_of_a_longer_buffer_is_two_in_chunks(toys):
    """Of 4 MiB among 8 ranks 2k = 10 chunks, so 2(10 + 3) rounds of a tenth."""
    cost = all_reduce_by(toys.problem(), "tree", 4 << 20, 8, 1)
    expected = 26 * (A_NS + (4 << 20) / 10 * B_NS)
    assert cost.alone_ns == pytest.approx(expected, rel=1e-5)
    assert cost.bytes == pytest.approx(26 / 10 * (4 << 20), abs=1)


def test_what_is_added_up():
    """Three of four parts once each; in a whole tree the buffer at both levels, in halves once."""
    assert added_bytes("ring", 4096, 4) == 12 * 1024 * 3 // 4
    assert added_bytes("tree", 4096, 4) == 12 * 1024 * 2
    assert added_bytes("tree", 4 << 20, 4) == 12 * (1 << 20)
