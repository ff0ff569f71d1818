"""What data parallelism adds at least, counted by hand."""

from __future__ import annotations

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.data_bound import DataBounds, floor_ns
from claw_plan.planner.shards import ShardSizes
from claw_plan.profiles.cost import CollectiveCost


def test_a_collective_is_rounded_down():
    cost = CollectiveCost(
        latency_ns=7, bytes=10, rate_cap_bytes_per_s=3e9, link="intra", source="analytic"
    )
    assert (floor_ns(cost), cost.alone_ns) == (7 + 3, 7 + 4)


def bounds_of(problem):
    return DataBounds(problem, ShardSizes(problem.graph))


@pytest.mark.parametrize(
    ("knobs", "gathers", "reduces"),
    [
        ({"zero": 3}, 2 * 4, 4),  # before each forward and backward; after each backward
        ({"zero": 2}, 1, 4),
        ({"zero": 1}, 1, 1),
        ({"zero": 3, "pp": 2, "dp_shard": 1, "dp_replicate": 2}, 0, 0),
        ({"zero": 3, "pp": 2}, 4 + 1, 1),  # cut after a forward only; reduced once a step
        ({"zero": 1, "pp": 2}, 1, 1),
    ],
)
def test_how_often_a_block_moves(toys, knobs, gathers, reduces):
    """8 x 8 weights of 4 bytes at 1e6 bytes/s and 5 us of latency: 261 us a gather, rounded down.

    Beside each a copy of what is gathered, at 10 bytes a ns: the shard's cast and the copy out.
    """
    problem = toys.problem(toys.graph(layers=4), toys.cluster(devices=4), global_batch=8)
    candidate = Candidate(**{"dp_shard": 2, **knobs})
    data = bounds_of(problem)
    assert candidate.num_microbatches(8) == 4
    traffic = data.traffic(candidate, 1, 3)
    gather_ns = 5_000 + 255_999 + (8 * 32) // 10 + (2 * 4 * 64) // 10
    reduce_ns = 5_000 + 255_999 + (8 * 64) // 10
    if candidate.dp_shard == 1:  # in fp32 replicas hold everything
        assert data.all_traffic(candidate, ((0, 3), (3, 6))) is None
    assert traffic.gather_ns == 2 * gathers * gather_ns
    assert traffic.reduce_ns == 2 * reduces * reduce_ns


@pytest.mark.parametrize(("pp", "whole", "near"), [(1, 4, 4), (2, 1, 4)])
def test_after_a_forward_near_ranks_hold_the_whole(toys, pp, whole, near):
    """Of 4 ranks on two nodes 2 are near: they gather 256 bytes at 1e6 bytes/s, not at 1e5.

    From the half of it that each keeps, which is read and written once at 10 bytes a ns.
    """
    problem = toys.problem(toys.graph(layers=4), toys.cluster(nodes=8, devices=2), global_batch=16)
    candidate = Candidate(dp_shard=4, reshard_ranks=2, pp=pp)
    traffic = bounds_of(problem).traffic(candidate, 1, 3)
    copy_ns = 2 * 4 * 64 // 10
    gather_ns = 5_000 + 2_559_999 + (8 * 16) // 10 + copy_ns
    near_ns = 5_000 + 255_999 + (2 * 4 * 32) // 10 + copy_ns
    assert traffic.gather_ns == 2 * (whole * gather_ns + near * near_ns)
    assert {unit.keep_ns for unit in traffic.units} == {(2 * 4 * 32) // 10}


def test_blocks_gathered_together_save_latency(toys):
    """4 blocks in 2 runs: as many bytes, half the collectives."""
    problem = toys.problem(toys.graph(layers=4), toys.cluster(devices=4), global_batch=8)
    data = bounds_of(problem)
    single, double = (
        data.traffic(Candidate(dp_shard=2, zero=2, blocks_per_group=blocks), 1, 5)
        for blocks in (1, 2)
    )
    assert [unit.gather_ns > 0 for unit in double.units] == [True, False, True, False]
    # What is rounded down twice as often may be a nanosecond a copy and a gather more.
    assert 0 <= single.gather_ns - 2 * 5_000 - double.gather_ns + 6 <= 12


def test_gradients_add_up_whole_where_they_are_reduced_once(toys):
    """12 bytes an element at 10 a ns, were adding not free in the toy; its cost is asked for."""
    problem = toys.problem(toys.graph(layers=4), toys.cluster(devices=4), global_batch=8)
    asked = []

    class Cost(type(problem.cost)):
        def op(self, work):
            asked.append(work.bytes)
            return super().op(work)

    object.__setattr__(problem, "cost", Cost(problem.cluster))
    data = bounds_of(problem)
    for zero, pp in ((3, 1), (1, 1), (3, 2)):
        data.accumulate_ns(Candidate(dp_shard=2, zero=zero, pp=pp), 1, 3)
    assert asked == [12 * 2 * 32, 12 * 2 * 64]  # the last is known from the one before


def test_the_optimizer_steps_over_the_shard(toys):
    """AdamW moves 28 bytes an element."""
    data = bounds_of(toys.problem(toys.graph(layers=4), toys.cluster(devices=4)))
    assert data.optimizer_ns(Candidate(dp_shard=2), 1, 3) == 28 * 2 * 32 // 10
