"""Two trees over all ranks: shapes, colours, rounds, and numbers of chunks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.profiles.collective_trees import (
    HALF_BYTES,
    MOST_PIECES,
    double_tree,
    fill_rounds,
    pieces_of,
    root_of,
    rounds_down,
)


@given(st.integers(2, 200))
def test_both_are_trees_over_all_and_inner_ranks_of_one_are_leaves_of_the_other(
    ranks: int,
) -> None:
    edges = double_tree(ranks)
    inner: list[set[int]] = []
    for tree in (0, 1):
        above = {edge.child: edge.parent for edge in edges if edge.tree == tree}
        assert sorted([*above, root_of(tree, ranks)]) == list(range(ranks))
        for place in range(ranks):
            way = [place]
            while way[-1] in above:
                way.append(above[way[-1]])
            assert way[-1] == root_of(tree, ranks)
            assert len(way) - 1 <= math.ceil(math.log2(ranks))
        inner.append(set(above.values()) - {root_of(tree, ranks)})
    assert not inner[0] & inner[1]


@given(st.integers(2, 200))
def test_nobody_sends_or_receives_twice_in_a_round_and_children_come_first(ranks: int) -> None:
    edges = double_tree(ranks)
    for end in ("child", "parent"):
        taken = [(getattr(edge, end), edge.first_round % 2) for edge in edges]
        assert len(set(taken)) == len(taken)
    for edge in edges:
        below = [
            one.first_round for one in edges if (one.parent, one.tree) == (edge.child, edge.tree)
        ]
        assert edge.first_round > max(below, default=-1)


@pytest.mark.parametrize(
    ("ranks", "rounds"), [(2, 1), (3, 2), (4, 3), (5, 4), (7, 4), (8, 5), (16, 7), (64, 11)]
)
def test_rounds_to_the_roots(ranks: int, rounds: int) -> None:
    """At least a round for each level, at most two: Sanders, Speck, Traeff 2009, section 3."""
    assert rounds_down(double_tree(ranks)) == rounds == fill_rounds(ranks) + 2
    assert math.ceil(math.log2(ranks)) <= rounds <= 2 * math.ceil(math.log2(ranks))


def test_short_buffers_stay_whole_and_long_ones_are_cut() -> None:
    assert pieces_of("tree", 64, [8]) == 1
    # the square root of 3 · 64 MiB / (4 · 128 KiB) = 19.6; 20 is nearer in time
    assert pieces_of("tree", 64 << 20, [8]) == 40
    # two trees of four nodes, whatever stands in them: c = 1, the root of 128, 11.3
    assert pieces_of("tree", 64 << 20, [8] * 4) == 22
    assert pieces_of("tree", 1 << 60, [100]) == MOST_PIECES
    assert pieces_of("ring", 64 << 20, [8]) == 1
    assert pieces_of("tree", 64 << 20, [1]) == 1


def test_two_halve_and_exchange_at_any_size() -> None:
    assert [pieces_of("tree", size, [2]) for size in (1, HALF_BYTES, 1 << 40)] == [2, 2, 2]
