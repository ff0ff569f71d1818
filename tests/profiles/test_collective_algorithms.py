"""Costs of algorithms: against closed forms, and against messages played in the simulator."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.profiles.collective_algorithms import (
    Hop,
    Links,
    fastest,
    rounds_of,
    time_ns,
)
from claw_plan.profiles.collective_schedules import ALGORITHMS, alike, node_sizes, rank_schedule
from claw_plan.profiles.collective_trees import fill_rounds, pieces_of
from claw_plan.simulator.simulate import makespan_ns
from claw_plan.simulator.task_graph import TaskGraph, TaskGraphBuilder

SIZE_BYTES = 5040 * 24 * 100
"""Chunks of up to 10 ranks, and their times below, are whole numbers."""

SLOW = Hop(latency_ns=2_000_000, bytes_per_s=24e6)

FAST = Hop(latency_ns=5_000, bytes_per_s=10e9)
ALIKE = Links(intra=SLOW, inter=SLOW)
TWO_LEVELS = Links(intra=FAST, inter=SLOW)


def lowered(
    algorithm: str, ranks: int, nodes: int, links: Links, size_bytes: int, pieces: int
) -> TaskGraph:
    """Every message a task: it waits for the last messages of its sender and its receiver.

    Between nodes it goes over the NICs of both, inside over the ports of both ranks.
    """
    layout = alike(ranks, nodes)
    parts = [rank_schedule(algorithm, rank, layout, pieces) for rank in range(ranks)]
    node_of = {rank: index for index, node in enumerate(layout) for rank in node}
    builder = TaskGraphBuilder()
    streams = [builder.stream(f"rank {rank}", rank) for rank in range(ranks)]

    def both_ways(name: str, count: int, hop: Hop) -> list[int]:
        names = [f"{name} {index} {way}" for index in range(count) for way in ("out", "in")]
        return [builder.link(one, hop.bytes_per_s) for one in names]

    ports, nics = both_ways("port", ranks, links.intra), both_ways("nic", nodes, links.inter)
    last: list[list[int]] = [[] for _ in range(ranks)]
    for turn in range(max(len(part.all_reduce) for part in parts)):
        ended: dict[int, list[int]] = {}
        for rank, part in enumerate(parts):
            step = part.all_reduce[turn]
            if step is None or step.target < 0:
                continue
            hop, ways, ends = links.intra, ports, (rank, step.target)
            if node_of[rank] != node_of[step.target]:
                hop, ways, ends = links.inter, nics, (node_of[rank], node_of[step.target])
            task = builder.add(
                streams[rank],
                round(hop.latency_ns),
                last[rank] + last[step.target],
                kind="send",
                name=f"{turn}: {rank} to {step.target}",
                work_bytes=size_bytes * (step.sends[1] - step.sends[0]) // part.chunks,
                rate_cap_bytes_per_s=hop.bytes_per_s,
                links=(ways[2 * ends[0]], ways[2 * ends[1] + 1]),
            )
            for one in (rank, step.target):
                ended.setdefault(one, []).append(task)
        for rank, tasks in ended.items():
            last[rank] = tasks
    return builder.build()


def played_ns(
    algorithm: str, ranks: int, nodes: int, links: Links, size_bytes: int = SIZE_BYTES
) -> int:
    """In as many chunks as the model holds for best."""
    pieces = pieces_of(
        algorithm, size_bytes, node_sizes(alike(ranks, nodes)), links.half_bytes(nodes)
    )
    return makespan_ns(lowered(algorithm, ranks, nodes, links, size_bytes, pieces))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 7, 8, 16])
def test_on_equal_links_the_formula_is_what_is_played(algorithm: str, ranks: int) -> None:
    # A tree's chunks are rounded to bytes, of 42 ns each.
    assert time_ns(algorithm, SIZE_BYTES, [ranks], ALIKE) == pytest.approx(
        played_ns(algorithm, ranks, 1, ALIKE), abs=1, rel=1e-5 if algorithm == "tree" else 0
    )


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8, 12, 13, 24, 48, 64])
@pytest.mark.parametrize("pieces", [1, 2, 4, 6, 24])
def test_a_tree_in_chunks_is_played_as_long_as_its_formula_says(ranks: int, pieces: int) -> None:
    if pieces > 2 and ranks == 2:
        pytest.skip("never more than one chunk each way")
    size_bytes = 48_000 * pieces  # 2 ms a chunk
    rounds = rounds_of("tree", (ranks,), pieces)
    said = sum(one.time_ns(size_bytes, ALIKE) for one in rounds)
    graph = lowered("tree", ranks, 1, ALIKE, size_bytes, pieces)
    assert said == pytest.approx(makespan_ns(graph), abs=1)
    if pieces > 1:
        assert said == (2 * pieces + 2 * fill_rounds(ranks)) * 4e6


@given(st.integers(2, 70), st.integers(1, 10**9), st.floats(1e3, 1e8))
@settings(deadline=None)
def test_no_other_number_of_chunks_is_better(ranks: int, size_bytes: int, half: float) -> None:
    hop = Hop(latency_ns=1000 * half, bytes_per_s=1e6)

    def spent_ns(pieces: int) -> float:
        rounds = rounds_of("tree", (ranks,), pieces)
        return sum(one.time_ns(size_bytes, Links(intra=hop, inter=hop)) for one in rounds)

    others = [1, *range(2, 1025, 2)] if ranks > 2 else [1, 2]
    best = min(map(spent_ns, others))
    assert spent_ns(pieces_of("tree", size_bytes, [ranks], half)) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize(
    ("algorithm", "ranks", "nodes"),
    [
        *(("hierarchical", *layout) for layout in [(4, 2), (8, 2), (8, 4), (6, 3), (9, 3)]),
        *(("ring", *layout) for layout in [(4, 2), (8, 2), (6, 3)]),
        *(("recursive_doubling", *layout) for layout in [(4, 2), (8, 2), (8, 4)]),
        *(("halving_doubling", *layout) for layout in [(4, 2), (8, 2), (8, 4)]),
        *(("tree", *layout) for layout in [(4, 2), (8, 2), (8, 4), (9, 3), (16, 16)]),
    ],
)
def test_over_shared_nics_too(algorithm: str, ranks: int, nodes: int) -> None:
    sizes = [len(node) for node in alike(ranks, nodes)]
    assert time_ns(algorithm, SIZE_BYTES, sizes, TWO_LEVELS) == pytest.approx(
        played_ns(algorithm, ranks, nodes, TWO_LEVELS), abs=1
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("ranks", "nodes"), [(3, 2), (5, 2), (7, 2), (8, 3)])
def test_over_uneven_nodes_nearly(algorithm: str, ranks: int, nodes: int) -> None:
    sizes = [len(node) for node in alike(ranks, nodes)]
    said = time_ns(algorithm, SIZE_BYTES, sizes, TWO_LEVELS)
    played = played_ns(algorithm, ranks, nodes, TWO_LEVELS)
    overlaps = algorithm in ("recursive_doubling", "halving_doubling")
    assert said == pytest.approx(played, rel=0.15 if overlaps else 1e-3)


def chunked_ns(ranks: int, chunks: int, latency_ns: float, wire_ns: float) -> float:
    """Down and up through two trees, of so many chunks each."""
    rounds = 1 if ranks == 2 else 2 * chunks + fill_rounds(ranks)
    return 2 * rounds * (latency_ns + wire_ns / (2 * chunks if ranks > 2 else 2))


@given(st.integers(2, 40), st.integers(1, 10**10), st.floats(1e3, 1e7), st.floats(1e6, 1e12))
@settings(deadline=None)
def test_closed_forms(ranks: int, size_bytes: int, latency_ns: float, rate: float) -> None:
    hop = Hop(latency_ns=latency_ns, bytes_per_s=rate)
    wire_ns = size_bytes * 1e9 / rate
    least = 2 * (ranks - 1) / ranks * wire_ns
    ring = 2 * (ranks - 1) * latency_ns + least
    whole = 2 * math.ceil(math.log2(ranks)) * (latency_ns + wire_ns)
    tree = min([whole, *(chunked_ns(ranks, k, latency_ns, wire_ns) for k in range(1, 513))])
    expected = {"ring": ring, "hierarchical": ring, "tree": tree}
    doublings = math.floor(math.log2(ranks))
    fold = 0 if ranks == 2**doublings else 2 * (latency_ns + wire_ns)
    expected["recursive_doubling"] = doublings * (latency_ns + wire_ns) + fold
    halves = 2 * (2**doublings - 1) / 2**doublings * wire_ns
    expected["halving_doubling"] = 2 * doublings * latency_ns + halves + fold
    links = Links(intra=hop, inter=hop)
    for algorithm, closed in expected.items():
        assert time_ns(algorithm, size_bytes, [ranks], links) == pytest.approx(closed)
    assert expected[fastest(size_bytes, [ranks], links)] == pytest.approx(min(expected.values()))


@given(
    st.sampled_from(ALGORITHMS),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.integers(1, 10**9),
)
@settings(deadline=None)
def test_more_bytes_never_take_less(algorithm: str, sizes: Sequence[int], size_bytes: int) -> None:
    less = time_ns(algorithm, size_bytes, sizes, TWO_LEVELS)
    assert 0 <= less <= time_ns(algorithm, size_bytes + 1000, sizes, TWO_LEVELS)


def test_regions() -> None:
    slow, far = Hop(latency_ns=1_000, bytes_per_s=1e6), Hop(latency_ns=1e9, bytes_per_s=1e12)
    for ranks in (3, 5, 6, 7):  # no powers of two, where halving-doubling has a ring's bytes
        assert fastest(10**8, [ranks], Links(intra=slow, inter=slow)) == "ring"
    for ranks in (3, 4, 8):
        assert fastest(1, [ranks], Links(intra=far, inter=far)) == "recursive_doubling"
    assert fastest(10**8, [8], ALIKE) == "halving_doubling"
    # Near partners first is a hierarchy too, with fewer rounds, where nodes are powers of two.
    assert fastest(10**8, [4, 4], TWO_LEVELS) == "halving_doubling"
    assert fastest(10**8, [3, 3, 3], TWO_LEVELS) == "hierarchical"
    # Between two nodes rings and trees send the same messages.
    assert fastest(10**3, [3, 3], TWO_LEVELS) in ("hierarchical", "tree")


@pytest.mark.parametrize(
    ("sizes", "least", "most"),
    [([1] * 100, 49.3, 197.4), ([8] * 12, 0.1, 2.83), ([8] * 100, 0.12, 197.4)],
)
def test_a_tree_is_best_where_many_meet_that_are_no_power_of_two(
    sizes: list[int], least: float, most: float
) -> None:
    """From `least` to `most` times what a link carries in the time in which a message starts."""
    half_bytes = TWO_LEVELS.half_bytes(len(sizes))
    for times, is_best in [
        *((least * 1.2, True), (most / 1.2, True), (least / 1.2, False), (most * 1.2, False))
    ]:
        best = fastest(int(times * half_bytes), sizes, TWO_LEVELS)
        assert (best == "tree") is is_best


def test_a_hierarchy_takes_a_message_to_the_network_once_a_node() -> None:
    def sent(algorithm: str, size: int, nodes: tuple[int, ...]) -> float:
        return size * sum(one.repeats * one.between for one in rounds_of(algorithm, nodes))

    # 2 M (R-1)/R for R nodes, against the whole of every rank's exchange
    assert sent("hierarchical", 1000, (4, 4)) == 1000
    assert sent("hierarchical", 1200, (2, 2, 2)) == pytest.approx(1600)
    assert sent("recursive_doubling", 1000, (4, 4)) == 4000
    assert sent("ring", 1000, (4, 4)) == pytest.approx(1750)
    assert sent("ring", 1000, (8,)) == 0


def test_one_rank_has_no_rounds() -> None:
    assert rounds_of("ring", (1,)) == ()
    assert time_ns("tree", 100, [1], ALIKE) == 0
