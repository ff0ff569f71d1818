"""Rounds of every algorithm played on plain integers, one set of terms a rank."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.profiles.collective_schedules import (
    ALGORITHMS,
    Nodes,
    RankSchedule,
    Step,
    Steps,
    alike,
    inside_nodes,
    node_sizes,
    rank_schedule,
    scatter_chunks,
)

Terms = list[list[list[int]]]
"""For each rank and chunk, whose numbers are in it."""


def play(steps: list[Steps], terms: Terms) -> Terms:
    """All rounds; every message must be met by a receive of the same chunks."""
    for turn in range(max(map(len, steps))):
        now = [rank_steps[turn] for rank_steps in steps]
        before = [[list(chunk) for chunk in rank] for rank in terms]
        for rank, step in enumerate(now):
            if step is None:
                continue
            if step.target >= 0:
                met = now[step.target]
                assert met is not None
                assert (met.source, met.receives) == (rank, step.sends)
            if step.source >= 0:
                sender = now[step.source]
                assert sender is not None
                assert sender.target == rank
                for chunk in range(*step.receives):
                    came = before[step.source][chunk]
                    terms[rank][chunk] = sorted(terms[rank][chunk] + came) if step.adds else came
    return terms


@st.composite
def layouts(draw: st.DrawFn) -> Nodes:
    """Up to 20 ranks in any order on nodes of any sizes."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    ranks = iter(draw(st.permutations(range(sum(sizes)))))
    return tuple(tuple(next(ranks) for _ in range(size)) for size in sizes)


def own(parts: list[RankSchedule]) -> Terms:
    return [[[rank] for _ in range(part.chunks)] for rank, part in enumerate(parts)]


PIECES = st.sampled_from([1, 2, 4, 10])
"""Of a tree."""


@given(st.sampled_from(ALGORITHMS), layouts(), PIECES)
@settings(deadline=None)
def test_every_rank_ends_with_each_ranks_numbers_once(
    algorithm: str, nodes: Nodes, pieces: int
) -> None:
    ranks = sum(node_sizes(nodes))
    parts = [rank_schedule(algorithm, rank, nodes, pieces) for rank in range(ranks)]
    assert len({part.chunks for part in parts}) == 1
    ended = play([part.all_reduce for part in parts], own(parts))
    assert ended == [[list(range(ranks))] * parts[0].chunks] * ranks


@pytest.mark.parametrize("ranks", [*range(2, 18), 31, 32, 33, 48, 63, 64])
@pytest.mark.parametrize("pieces", [1, 2, 6])
def test_trees_of_up_to_64(ranks: int, pieces: int) -> None:
    for nodes in (alike(ranks), alike(ranks, 1 + ranks // 3)):
        parts = [rank_schedule("tree", rank, nodes, pieces) for rank in range(ranks)]
        ended = play([part.all_reduce for part in parts], own(parts))
        assert ended == [[list(range(ranks))] * parts[0].chunks] * ranks
        assert len({len(part.all_reduce) for part in parts}) == 1


@given(st.sampled_from(ALGORITHMS), layouts(), PIECES)
@settings(deadline=None)
def test_on_the_way_each_chunk_is_whole_where_it_is_held(
    algorithm: str, nodes: Nodes, pieces: int
) -> None:
    ranks = sum(node_sizes(nodes))
    parts = [rank_schedule(algorithm, rank, nodes, pieces) for rank in range(ranks)]
    ended = play([part.down for part in parts], own(parts))
    holders = scatter_chunks(algorithm, nodes) if pieces == 1 else None
    if holders is not None:
        assert sorted(holders) == list(range(ranks))
    for rank, part in enumerate(parts):
        for chunk in range(*part.holds):
            assert ended[rank][chunk] == list(range(ranks))
            assert holders is None or holders[chunk] == rank


@given(layouts())
@settings(deadline=None)
def test_inside_nodes_the_sums_of_nodes_lie_with_ranks_of_one_place(nodes: Nodes) -> None:
    ranks = sum(node_sizes(nodes))
    found = [inside_nodes(rank, nodes) for rank in range(ranks)]
    parts = [schedule for schedule, _ in found]
    ended = play([part.down for part in parts], own(parts))
    for rank, (part, elsewhere) in enumerate(found):
        assert (rank in elsewhere) == (part.holds != (0, 0))
        for chunk in range(*part.holds):
            (node,) = [node for node in nodes if rank in node]
            assert ended[rank][chunk] == sorted(node)
            assert [found[other][0].holds for other in elsewhere] == [part.holds] * len(nodes)


def test_a_ring_of_three_by_hand() -> None:
    schedule = rank_schedule("ring", 0, alike(3))
    first = Step(target=1, sends=(2, 3), source=2, receives=(1, 2), adds=True)
    second = Step(target=1, sends=(1, 2), source=2, receives=(0, 1), adds=True)
    assert schedule.down == (first, second)
    assert schedule.up[0] == Step(target=2, sends=(0, 1), source=1, receives=(1, 2))


def test_two_trees_of_four_by_hand() -> None:
    """0 <- 2 <- 1, 3 and mirrored 3 <- 1 <- 2, 0: inner ranks of one are leaves of the other."""
    schedules = [rank_schedule("tree", rank, alike(4), 2) for rank in range(4)]
    sent = [
        [(turn, step.target, step.sends) for turn, step in enumerate(one.down) if step]
        for one in schedules
    ]
    first, second = (0, 1), (1, 2)
    for rank, goes in enumerate(sent):
        targets = {(0, second): 1, (1, first): 2, (1, second): 3, (2, first): 0, (2, second): 1}
        targets |= {(3, first): 2}
        for _, target, part in goes:
            if target >= 0:
                assert targets.pop((rank, part)) == target
    assert [one.holds for one in schedules] == [(0, 1), (0, 0), (0, 0), (1, 2)]
    assert len(schedules[0].down) == 3


def test_the_largest_messages_of_halving_stay_near() -> None:
    steps = rank_schedule("halving_doubling", 0, alike(8, 2)).down
    assert [(step.target, step.sends) for step in steps if step] == [
        (1, (4, 8)),
        (2, (2, 4)),
        (4, (1, 2)),
    ]


def test_rounds_are_as_many_as_the_formulas_say() -> None:
    for ranks, nodes, expected in [
        (8, 1, {"ring": 14, "tree": 6, "recursive_doubling": 3, "halving_doubling": 6}),
        (6, 2, {"ring": 10, "tree": 6, "recursive_doubling": 4, "halving_doubling": 6}),
        (8, 2, {"hierarchical": 2 * 3 + 2 * 1}),
        (8, 4, {"hierarchical": 2 * 1 + 2 * 3}),
    ]:
        for algorithm, rounds in expected.items():
            schedule = rank_schedule(algorithm, 1, alike(ranks, nodes))
            assert len(schedule.all_reduce) == rounds


def test_parts_of_ranks_left_over_cannot_be_scattered() -> None:
    assert scatter_chunks("halving_doubling", alike(4)) == [0, 2, 1, 3]
    assert scatter_chunks("hierarchical", alike(4, 2)) == [0, 2, 1, 3]
    for algorithm, nodes in [
        ("tree", alike(2)),
        ("halving_doubling", alike(3)),
        ("hierarchical", alike(3, 2)),
    ]:
        assert scatter_chunks(algorithm, nodes) is None


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="algorithm must be one of"):
        rank_schedule("butterfly", 0, alike(2))
