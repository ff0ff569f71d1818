"""Orders of ranks against brute force, planted rings, and the mesh of eight V100."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations, permutations
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.profiles.cluster_file import cluster_from_mapping
from claw_plan.profiles.rank_order import (
    Matrix,
    nested_order,
    node_costs,
    ring_order,
    ring_worst,
)

TOPOLOGIES = Path(__file__).parents[3] / "shared" / "corpus" / "topology"


@st.composite
def matrices(draw: st.DrawFn, most: int = 7) -> list[list[float]]:
    """Few different costs, so that many orders are equally good."""
    size = draw(st.integers(2, most))
    costs = st.sampled_from([1.0, 2.0, 3.0, 5.0, 9.0])
    return [[draw(costs) for _ in range(size)] for _ in range(size)]


def brute_force(costs: Matrix) -> float:
    rest = range(1, len(costs))
    return min(ring_worst(costs, (0, *order)) for order in permutations(rest))


@given(matrices())
@settings(deadline=None)
def test_rings_are_as_good_as_the_best_of_all(costs: Matrix) -> None:
    found = ring_order(costs)
    assert sorted(found.order) == list(range(len(costs)))
    assert found.worst == ring_worst(costs, found.order) == brute_force(costs)
    assert found.is_proven


def test_rings_of_eight_too() -> None:
    draw = random.Random(7)
    for _ in range(4):
        costs = [[draw.random() for _ in range(8)] for _ in range(8)]
        assert ring_order(costs).worst == brute_force(costs)


def test_a_ring_goes_around_one_slow_pair() -> None:
    costs = [[1.0] * 4 for _ in range(4)]
    costs[1][2] = 10.0  # one way only
    assert ring_worst(costs, (0, 1, 2, 3)) == 10
    found = ring_order(costs)
    assert found.worst == 1
    assert 2 not in (found.order[found.order.index(1) - 1], found.order[found.order.index(1) - 3])


def test_a_slow_rank_cannot_be_gone_around() -> None:
    costs = [[9.0 if 1 in (i, j) else 1.0 for j in range(4)] for i in range(4)]
    found = ring_order(costs)
    assert (found.order, found.worst, found.is_proven) == ((0, 1, 2, 3), 9, True)


@pytest.mark.parametrize("size", [13, 16, 24, 40])
def test_beyond_the_exact_sizes_a_planted_ring_is_found(size: int) -> None:
    draw = random.Random(size)
    planted = draw.sample(range(size), size)
    costs = [[float(draw.choice([2, 3, 4])) for _ in range(size)] for _ in range(size)]
    for place, one in enumerate(planted):
        other = planted[place - 1]
        costs[one][other] = costs[other][one] = 1.0
    found = ring_order(costs)
    assert sorted(found.order) == list(range(size))
    assert found.lower_bound <= found.worst == ring_worst(costs, found.order)
    assert found.worst <= 2  # most links cost at most 3 both ways; a ring of 1 is one in (n-1)!/2
    assert ring_order(costs) == found


def test_the_bound_sees_a_rank_that_parts_the_others() -> None:
    # Two full groups of seven that share rank 6: every ring crosses from one to the other twice.
    size = 13
    costs = [
        [1.0 if (i < 7) == (j < 7) or 6 in (i, j) else 4.0 for j in range(size)]
        for i in range(size)
    ]
    found = ring_order(costs)
    assert (found.worst, found.lower_bound) == (4, 4)


NV = {"NV2": 1 / 50e9, "NV1": 1 / 25e9, "SYS": 1 / 8e9}
"""Seconds a byte: an NVLink of a V100 carries 25 GB/s (WP-08608); across sockets PCIe 3.0."""

DOUBLE = [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)]
SINGLE = [(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)]


def mesh(kinds: dict[str, list[tuple[int, int]]]) -> list[list[float]]:
    costs = [[NV["SYS"]] * 8 for _ in range(8)]
    for kind, pairs in kinds.items():
        for one, other in pairs:
            costs[one][other] = costs[other][one] = NV[kind]
    return costs


def test_pairs_of_eight_v100_get_both_nvlinks_and_fours_an_nvlink_each() -> None:
    costs = mesh({"NV2": DOUBLE, "NV1": SINGLE})
    pairs = nested_order(costs, [2])
    assert {tuple(sorted(pairs.order[i : i + 2])) for i in range(0, 8, 2)} <= set(DOUBLE)
    assert (pairs.worst, pairs.is_proven) == (NV["NV2"], True)
    fours = nested_order(costs, [4])
    for first in (0, 4):
        four = fours.order[first : first + 4]
        assert ring_worst([[costs[i][j] for j in four] for i in four], range(4)) == fours.worst
    assert fours.worst <= NV["NV1"]
    # The mesh has a ring of double links: 0-3-2-1-5-6-7-4.
    assert ring_order(costs).worst == NV["NV2"]


def test_pairs_in_fours_have_fast_links_at_both_levels() -> None:
    found = nested_order(mesh({"NV2": DOUBLE, "NV1": SINGLE}), [2, 2, 2])
    assert sorted(found.order) == list(range(8))
    assert found.worst == NV["NV2"]


@pytest.mark.parametrize("number", ["01", "02"])
def test_published_meshes_of_v100(number: str) -> None:
    file = TOPOLOGIES / f"{number}.yaml"
    if not file.exists():
        pytest.skip(f"{file.name} of the corpus is not here")
    read = yaml.safe_load(file.read_text())["right_reading"]["pairs"]
    kinds = {kind: [tuple(pair) for pair in read[kind]] for kind in ("NV1", "NV2")}
    found = nested_order(mesh(kinds), [2])
    assert found.worst == NV["NV2"]
    assert ring_order(mesh(kinds)).worst == NV["NV2"]


@given(matrices(most=6), st.data())
@settings(deadline=None, max_examples=30)
def test_groups_are_as_good_as_the_best_of_all(costs: Matrix, data: st.DataObject) -> None:
    count = len(costs)
    size = data.draw(st.sampled_from([one for one in range(2, count + 1) if count % one == 0]))
    found = nested_order(costs, [size])

    @cache
    def worst(group: frozenset[int]) -> float:
        rings = permutations(group)
        return min(ring_worst([[costs[i][j] for j in r] for i in r], range(size)) for r in rings)

    best = min(
        max(worst(frozenset(order[first : first + size])) for first in range(0, count, size))
        for order in permutations(range(count))
    )
    assert found.worst == found.lower_bound == best


def test_many_ranks_in_pairs_are_exchanged_until_none_gets_better() -> None:
    draw = random.Random(3)
    partners = draw.sample(range(24), 24)
    costs = [[draw.choice([2.0, 3.0]) for _ in range(24)] for _ in range(24)]
    for place in range(0, 24, 2):
        one, other = partners[place : place + 2]
        costs[one][other] = costs[other][one] = 1.0
    found = nested_order(costs, [2])
    assert sorted(found.order) == list(range(24))
    assert found.lower_bound == 1.0
    assert found.worst <= 2.0


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="sizes divide the 6 ranks"):
        nested_order([[1.0] * 6 for _ in range(6)], [4])


def test_costs_of_a_node_are_its_pairs() -> None:
    pairs = [[one, other, "nvlink2 x2"] for one, other in DOUBLE]
    pairs += [[one, other, "nvlink2 x1"] for one, other in SINGLE]
    cluster = cluster_from_mapping(
        {
            "name": "mesh",
            "nodes": [
                {
                    "devices": {"type": "v100-sxm-32gb", "count": 8},
                    "intra": {"default": {"type": "pcie3-x16"}, "pairs": pairs},
                }
            ],
        },
        "here",
    )
    costs = node_costs(cluster.nodes[0])
    assert costs[0][3] < costs[0][1] < costs[0][5]
    assert all(costs[i][j] == costs[j][i] for i, j in combinations(range(8), 2))
    assert nested_order(costs, [2]).worst == costs[0][3]
