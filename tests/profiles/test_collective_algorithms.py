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
from claw_plan.profiles.collective_schedules import ALGORITHMS, alike, rank_schedule
from claw_plan.simulator.simulate import makespan_ns
from claw_plan.simulator.task_graph import TaskGraph, TaskGraphBuilder

SIZE_BYTES = 5040 * 24 * 100
"""Chunks of up to 10 ranks, and their times below, are whole numbers."""

SLOW = Hop(latency_ns=2_000_000, bytes_per_s=24e6)

FAST = Hop(latency_ns=5_000, bytes_per_s=10e9)
ALIKE = Links(intra=SLOW, inter=SLOW)
TWO_LEVELS = Links(intra=FAST, inter=SLOW)


def lowered(algorithm: str, ranks: int, nodes: int, links: Links) -> TaskGraph:
    """Every message a task: it waits for the last messages of its sender and its receiver.

    Between nodes it goes over the NICs of both, inside over the ports of both ranks.
    """
    layout = alike(ranks, nodes)
    parts = [rank_schedule(algorithm, rank, layout) for rank in range(ranks)]
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
                work_bytes=SIZE_BYTES * (step.sends[1] - step.sends[0]) // part.chunks,
                rate_cap_bytes_per_s=hop.bytes_per_s,
                links=(ways[2 * ends[0]], ways[2 * ends[1] + 1]),
            )
            for one in (rank, step.target):
                ended.setdefault(one, []).append(task)
        for rank, tasks in ended.items():
            last[rank] = tasks
    return builder.build()


def played_ns(algorithm: str, ranks: int, nodes: int, links: Links) -> int:
    return makespan_ns(lowered(algorithm, ranks, nodes, links))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 7, 8, 16])
def test_on_equal_links_the_formula_is_what_is_played(algorithm: str, ranks: int) -> None:
    assert time_ns(algorithm, SIZE_BYTES, [ranks], ALIKE) == pytest.approx(
        played_ns(algorithm, ranks, 1, ALIKE), abs=1
    )


@pytest.mark.parametrize(
    ("algorithm", "ranks", "nodes"),
    [
        *(("hierarchical", *layout) for layout in [(4, 2), (8, 2), (8, 4), (6, 3), (9, 3)]),
        *(("ring", *layout) for layout in [(4, 2), (8, 2), (6, 3)]),
        *(("recursive_doubling", *layout) for layout in [(4, 2), (8, 2), (8, 4)]),
        *(("halving_doubling", *layout) for layout in [(4, 2), (8, 2), (8, 4)]),
        *(("tree", *layout) for layout in [(4, 2), (8, 2), (8, 4), (6, 3)]),
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
    overlaps = algorithm not in ("ring", "hierarchical")
    assert said == pytest.approx(played, rel=0.15 if overlaps else 1e-3)


@given(st.integers(2, 40), st.integers(1, 10**10), st.floats(0, 1e7), st.floats(1e6, 1e12))
@settings(deadline=None)
def test_closed_forms(ranks: int, size_bytes: int, latency_ns: float, rate: float) -> None:
    hop = Hop(latency_ns=latency_ns, bytes_per_s=rate)
    wire_ns = size_bytes * 1e9 / rate
    least = 2 * (ranks - 1) / ranks * wire_ns
    ring = 2 * (ranks - 1) * latency_ns + least
    tree = 2 * math.ceil(math.log2(ranks)) * (latency_ns + wire_ns)
    expected = {"ring": ring, "hierarchical": ring, "tree": tree}
    doublings = math.floor(math.log2(ranks))
    fold = 0 if ranks == 2**doublings else 2 * (latency_ns + wire_ns)
    expected["recursive_doubling"] = doublings * (latency_ns + wire_ns) + fold
    halves = 2 * (2**doublings - 1) / 2**doublings * wire_ns
    expected["halving_doubling"] = 2 * doublings * latency_ns + halves + fold
    links = Links(intra=hop, inter=hop)
    for algorithm, closed in expected.items():
        assert time_ns(algorithm, size_bytes, [ranks], links) == pytest.approx(closed)
    assert expected["recursive_doubling"] <= expected["tree"] * (1 + 1e-9)
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
    assert fastest(10**3, [3, 3], TWO_LEVELS) == "hierarchical"


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
