"""Group sizes on the toy model: a tied 64 x 8 table and four 8 x 8 weights that tp divides."""

from __future__ import annotations

from dataclasses import replace

from claw_plan.planner.graph import Parameter
from claw_plan.planner.shards import ROOT, SCALARS, GroupSize, ShardSizes, joined, runs_of


def test_every_parameter_once(toys):
    sizes = ShardSizes(toys.graph(layers=4)).groups(0, 6, 1, 1)
    assert {group: size.whole for group, size in sizes.items()} == {
        ROOT: 512, 1: 64, 2: 64, 3: 64, 4: 64,
    }  # fmt: skip


def test_both_ends_of_a_pipeline_hold_the_tied_table(toys):
    shards = ShardSizes(toys.graph(layers=4))
    assert shards.groups(0, 3, 1, 1)[ROOT].whole == 512
    assert shards.groups(3, 6, 1, 1)[ROOT].whole == 512


def test_tensor_parallelism_divides_what_has_a_dimension_for_it(toys):
    sizes = ShardSizes(toys.graph(layers=4)).groups(0, 6, 4, 1)
    assert (sizes[ROOT].whole, sizes[1].whole) == (512, 16)


def test_shards_are_padded_in_dimension_0():
    """7 rows over 4 ranks: torch.chunk gives (2, 2, 2, 1), so the largest shard has 2 rows."""
    weight = Parameter(names=("w",), shape=(7, 5), dtype="float32", trainable=True, units=(1,))
    size = GroupSize().plus(weight, 1, 4)
    assert (size.whole, size.shard, size.trainable_shard) == (35, 10, 10)


def test_frozen_parameters_have_no_gradient(toys):
    weight = Parameter(names=("w",), shape=(8, 5), dtype="float32", trainable=False, units=(1,))
    size = GroupSize().plus(weight, 1, 2)
    assert (size.whole, size.shard, size.trainable_whole, size.trainable_shard) == (40, 20, 0, 0)


def test_a_number_without_dimensions_stays_whole_outside_the_groups(toys):
    """As fully_shard has it: it refuses to cut what has no dimension."""
    graph = toys.graph(layers=4)
    scale = Parameter(names=("scale",), shape=(), dtype="float32", trainable=True, units=(0,))
    sizes = ShardSizes(replace(graph, parameters=(*graph.parameters, scale))).groups(0, 6, 1, 4)
    assert (sizes[SCALARS].whole, sizes[SCALARS].trainable_shard) == (1, 1)
    assert sizes[ROOT].whole == 512


def test_runs_are_of_blocks_alone_and_end_with_the_stage():
    assert runs_of(0, 8, 7, 1) == [range(u, u + 1) for u in range(8)]
    assert runs_of(0, 8, 7, 4) == [range(0, 1), range(1, 5), range(5, 7), range(7, 8)]
    assert runs_of(3, 6, 7, 2) == [range(3, 5), range(5, 6)]
    assert runs_of(3, 8, 7, 9) == [range(3, 7), range(7, 8)]


def test_runs_hold_what_their_blocks_hold(toys):
    sizes = ShardSizes(toys.graph(layers=4)).groups(0, 6, 1, 2)
    found = joined(sizes, runs_of(0, 6, 5, 3))
    assert {group: size.whole for group, size in found.items()} == {ROOT: 512, 1: 192, 4: 64}
    assert (found[1].shard, found[1].largest, found[1].count) == (96, 32, 3)
