"""Ways over unlike devices, and what their stages may be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from claw_plan.planner.mixed.space import REPLICATED, SHARDED, STATES, Division, MixedSpace, Way


@pytest.fixture(scope="module")
def space(toys, mixed_toys) -> MixedSpace:
    kinds = [
        mixed_toys.ToyKind(tensor_bytes=9000),
        mixed_toys.ToyKind(devices=3, flops_per_s=2e6),
    ]
    graph = toys.graph(layers=4, width=16)
    return MixedSpace(mixed_toys.mixed_scorer(toys, kinds, global_batch=4, graph=graph))


def test_divisions_stay_in_a_node_and_divide_heads_and_microbatch(space):
    """Two devices, microbatches of 4: tp 1 or 2 with the sequence or without, dp 1 or 2."""
    assert space.divisions(0, 4) == [
        Division(1, 1, False),
        Division(1, 2, False),
        Division(2, 1, False),
        Division(2, 1, True),
    ]
    assert Division(1, 4, False) not in space.divisions(1, 4)  # it has three devices


def test_degrees_that_divide_some_of_a_block_are_offered_without_sequence(toys, mixed_toys):
    kinds = [mixed_toys.ToyKind(), mixed_toys.ToyKind(flops_per_s=2e6)]
    graph = replace(toys.graph(layers=2), tp_divides=1, partial={2: ()})
    space = MixedSpace(mixed_toys.mixed_scorer(toys, kinds, global_batch=2, graph=graph))
    assert [each for each in space.divisions(0, 2) if each.tp == 2] == [Division(2, 1, False)]


def test_dp_shares_nothing_where_there_is_none(space):
    assert space.sharings((None, Division(2, 1, False))) == [(REPLICATED, REPLICATED)]
    assert space.sharings((Division(1, 2, False), Division(1, 1, False))) == [
        (REPLICATED, REPLICATED),
        (SHARDED, REPLICATED),
        (STATES, REPLICATED),
    ]


def test_ways_are_of_two_kinds_in_the_order_of_their_bounds(space):
    rows, bound_ns, sizes = space.rows()
    per_batch = [
        len(space.divisions(0, size)) * len(space.divisions(1, size)) for size in (1, 2, 4)
    ]
    assert len(rows) == sum(per_batch)
    assert list(bound_ns) == sorted(bound_ns) and int(sizes.max()) == 9


@pytest.mark.parametrize("sharing", [REPLICATED, SHARDED, STATES])
def test_a_chain_knows_what_fits_at_every_place(space, sharing):
    way = Way(2, (Division(1, 2, False), Division(1, 1, False)), (sharing, REPLICATED))
    chain, memory = space.chain(way), space.scorer.memory_of(0, 4)
    units = len(space.scorer.problem.whole.graph.units)
    refused = 0
    for recompute, name in enumerate(("none", "full")):
        for behind in range(2):
            candidate = space.candidate(2, way.divisions[0], sharing, name, behind + 2)
            for stop in [units] if behind == 0 else range(2, units):
                lowest = int(chain.lowest[0, recompute, behind, stop])
                fits = [memory.stage(candidate, 1, s, stop).fits for s in range(stop)]
                assert fits == [start >= lowest for start in range(stop)]
                refused += fits.count(False)
    assert refused > 0
