"""A codec's mean as messages of each rank, against closed forms and against each other."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.profiles.codecs import describe_codec
from claw_plan.profiles.coded_means import (
    ACTING,
    messages,
    own_elements,
    part_bounds,
    part_sizes,
    straight_turns,
    time_ns,
)
from claw_plan.profiles.collective_algorithms import Hop, Links
from claw_plan.profiles.collective_schedules import alike


def test_parts_begin_at_whole_bytes_of_bits():
    assert part_bounds(100, 3) == [0, 32, 64, 100]
    assert part_bounds(5, 4) == [0, 0, 0, 0, 5]
    assert part_bounds(0, 2) == [0, 0, 0]


@given(st.integers(0, 10_000), st.integers(1, 9))
def test_parts_are_even_multiples_of_eight_and_a_rest(elements, parts):
    sizes = part_sizes(elements, parts)
    assert len(sizes) == parts and sum(sizes) == elements
    assert max(sizes) - min(sizes) < 16
    assert sum(bool(size % 8) for size in sizes) <= 1


@pytest.mark.parametrize("algorithm, gathers", [("ring", 3), ("halving_doubling", 2)])
def test_one_bit_of_four_ranks(algorithm, gathers):
    """131,072 elements: four parts of 32,768 bits and a scale, straight to three others.

    Three parts come back, one in each round of a ring, one and then two where they double.
    """
    found = list(messages(describe_codec("one_bit"), algorithm, 131_072, 1, alike(4, 2)))
    part = 32_768 // 8 + 4
    sent = [size for op, size in found if op == "send"]
    assert sent == [size for op, size in found if op == "recv"]
    assert sum(sent) == 6 * part == 24_600
    assert sent[:3] == [part] * 3 and len(sent) == 3 + gathers


def test_inside_nodes_numbers_travel_whole():
    """1003 elements on two nodes of two: halves of 504 and 499 are sent inside, in fp32.

    Rank 1 is left with the second half, of which each node gets a part: 248 and 251 elements.
    """
    int8 = describe_codec("int8")
    found = Counter(messages(int8, "hierarchical", 1003, 1, alike(4, 2)))
    wire = {248: 248 + 4, 251: 252 + 4}
    assert found == Counter(
        [
            ("send", 4 * 504), ("recv", 4 * 499),
            ("send", wire[251]), ("recv", wire[248]),
            ("send", wire[251]), ("recv", wire[251]),
            ("send", 4 * 499), ("recv", 4 * 504),
        ]
    )  # fmt: skip
    assert own_elements(1003, 1, alike(4, 2)) == 499


@pytest.mark.parametrize("algorithm, rounds", [("ring", 3), ("halving_doubling", 2)])
def test_what_the_messages_take(algorithm, rounds):
    """Four ranks of one node, 4096 elements in int8: parts of 1040 bytes, 1 us a message."""
    hop = Hop(latency_ns=1000.0, bytes_per_s=1e9)
    found = time_ns(describe_codec("int8"), algorithm, 4096, (4,), Links(intra=hop, inter=hop))
    assert found == 3 * (1000 + 1040) + rounds * 1000 + 3 * 1040


def test_between_nodes_ranks_of_a_node_share_its_way_out():
    """Two nodes of two: one rank of each sends to the other in turns 1 and 3, both in turn 2.

    Around the ring one of each sends to the next node at a time.
    """
    assert straight_turns((2, 2)) == ((1, 2), (2, 1))
    near, far = (Hop(latency_ns=0.0, bytes_per_s=rate) for rate in (1e12, 1e9))
    found = time_ns(describe_codec("int8"), "ring", 4096, (2, 2), Links(intra=near, inter=far))
    assert found == (2 * 1 + 1 * 2) * 1040 + 3 * 1040


@given(
    st.sampled_from(ACTING),
    st.sampled_from(["int8", "one_bit", "top_k:0.1"]),
    st.integers(0, 3000),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_what_is_sent_comes_somewhere(algorithm, codec, elements, nodes, local):
    """Over all ranks each size is sent as often as it is received."""
    ranks = nodes * local
    if algorithm == "halving_doubling" and ranks & (ranks - 1):
        ranks, nodes = 4, 2
    found = Counter[str, int]()
    for rank in range(ranks):
        found.update(
            messages(describe_codec(codec), algorithm, elements, rank, alike(ranks, nodes))
        )
    sizes = {size for _, size in found}
    assert all(found["send", size] == found["recv", size] for size in sizes)
    assert all(sizes)
