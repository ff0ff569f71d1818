"""The space against the same rules written as plain loops."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.errors import PlanError
from claw_plan.planner.members import divisors
from claw_plan.planner.schedules import SCHEDULES
from claw_plan.planner.space import Space
from claw_plan.planner.supported import refusal


def members(space):
    return [candidate for group in space.groups() for candidate in space.members(group)]


def runs(schedule, pp, stages, layers, count):
    """The rules of the schedules as PyTorch's classes state them."""
    if schedule == "1F1B":
        return stages == 1 and pp <= layers
    if pp == 1 or pp * stages > layers:
        return False
    if count == 1 and not SCHEDULES[schedule].splits_backward:
        return False
    if "Interleaved" in schedule:
        fewest = 1 if "Zero" in schedule else 2
        equal = stages <= 2 or layers % (pp * stages) == 0
        return stages >= fewest and equal and count % max(1, count // pp) == 0
    if schedule == "DualPipeV":
        return stages == 2 and count >= 2 * pp
    return stages == (2 if schedule == "ZBVZeroBubble" else 1)


ORDERS = (
    "pp dp_replicate dp_shard cp tp",
    "dp_replicate dp_shard cp pp tp",
    "dp_replicate pp dp_shard cp tp",
    "pp tp dp_replicate dp_shard cp",
    "tp pp dp_replicate dp_shard cp",
    "dp_replicate dp_shard cp tp pp",
    "tp dp_replicate dp_shard cp pp",
)


ALGORITHMS = ("auto", "ring", "tree", "recursive_doubling", "halving_doubling", "hierarchical")


def in_orders(candidate, devices):
    """With the axes in each order whose ranks lie otherwise than in those before it."""
    found = {}
    for text in ORDERS:
        order = tuple(text.split())
        ranks = np.arange(candidate.num_devices)
        grid = ranks.reshape([getattr(candidate, axis) for axis in order])
        spans = [
            nodes_of(np.moveaxis(grid, order.index(axis), -1), devices)
            for axis in ("tp", "dp_replicate", "dp_shard")
        ]
        stages = np.moveaxis(grid, order.index("pp"), 0).reshape(candidate.pp, -1) // devices
        crosses = [
            bool((stages[i] != stages[(i + 1) % len(stages)]).any()) for i in range(len(stages))
        ]
        laid = replace(candidate, mesh_order=order)
        found.setdefault(repr((spans, crosses, near_of(laid, devices))), laid)
    return found.values()


def nodes_of(groups, devices):
    """The most nodes of a group, groups along the last axis."""
    rows = groups.reshape(-1, groups.shape[-1]) // devices
    return max(len(set(row)) for row in rows.tolist())


def near_of(candidate, devices):
    """The most neighbours on dp_shard within a node, in a list; empty where there are none."""
    order = candidate.mesh_order
    apart = prod(getattr(candidate, axis) for axis in order[order.index("dp_shard") + 1 :])
    inside = [n for n in range(2, candidate.dp_shard) if devices % (n * apart) == 0]
    return [n for n in inside if candidate.dp_shard % n == 0][-1:]


def by_loops(layers, heads, nodes, devices, batch, kind):
    """Every legal combination of knobs, those that cannot act at their neutral value."""
    degrees = range(1, nodes * devices + 1)
    flags = (False, True)
    for pp, tp, replicate, shard in product(degrees, repeat=4):
        used = pp * tp * replicate * shard
        if used > nodes * devices or heads % tp or pp > layers:
            continue
        for size in range(1, batch + 1):
            if batch % (replicate * shard * size):
                continue
            count = batch // (replicate * shard * size)
            for schedule, stages, zero, sequence, recompute, offload in product(
                SCHEDULES,
                range(1, layers + 1),
                (1, 2, 3),
                flags,
                ("none", "full", "half"),
                ("none", "optimizer") if kind == "cuda" else ("none",),
            ):
                if not runs(schedule, pp, stages, layers, count):
                    continue
                if SCHEDULES[schedule].splits_backward and recompute != "none":
                    continue
                if (zero < 3 and shard == 1) or (sequence and tp == 1):
                    continue
                if zero == 1 and pp == 1 and count == 1:
                    continue
                candidate = Candidate(
                    pp=pp, tp=tp, dp_replicate=replicate, dp_shard=shard, microbatch_size=size,
                    schedule=schedule, stages_per_rank=stages, zero=zero,
                    sequence_parallel=sequence, recompute=recompute, offload=offload,
                )  # fmt: skip
                if not refusal(candidate):
                    for laid in in_orders(candidate, devices):
                        yield from finer(laid, -(-layers // (pp * stages)), devices, kind)


def finer(candidate, blocks, devices, kind):
    """With some blocks of a stage run again, or gathered together, or among near ranks.

    Between CPU hosts replicas may meet by other algorithms.
    """
    again = range(blocks if candidate.recompute != "none" else 1)
    near = near_of(candidate, devices) * (candidate.zero == 3)
    together = [n for n in (1, 2, 4) if n <= blocks and (n == 1 or candidate.dp_shard > 1)]
    degrees = candidate.pp * candidate.dp_shard * candidate.tp
    meets = candidate.dp_replicate > devices and degrees == 1 and kind == "cpu"
    means = ALGORITHMS if meets else ("auto",)
    for some, ranks, number, algorithm in product(again, [0, *near], together, means):
        yield replace(
            candidate, recompute_blocks=some, reshard_ranks=ranks, blocks_per_group=number,
            collective=algorithm,
        )  # fmt: skip


@pytest.mark.parametrize(
    "nodes, devices, batch, kind", [(1, 4, 8, "cuda"), (2, 3, 6, "cuda"), (3, 2, 6, "cpu")]
)
def test_holds_every_legal_candidate_once(toys, nodes, devices, batch, kind):
    """Two heads; on nodes of three devices some groups of tp=2 lie on two."""
    cluster = toys.cluster(nodes=nodes, devices=devices, kind=kind)
    problem = toys.problem(toys.graph(layers=6, heads=2), cluster, global_batch=batch)
    space = Space(problem, {})
    found = members(space)
    assert len(found) == len(set(found))
    assert set(found) == set(by_loops(6, 2, nodes, devices, batch, kind))
    assert sum(group.size for group in space.groups()) == len(found)
    for knob, values in space.knob_sizes().items():
        name = "num_devices" if knob == "devices" else knob
        assert values == len({getattr(candidate, name) for candidate in found}), knob


def test_the_host_of_a_cpu_is_no_other_memory_but_may_be_pinned(toys):
    problem = toys.problem(cluster=toys.cluster(devices=2, kind="cpu"))
    assert {c.offload for c in members(Space(problem, {}))} == {"none"}
    assert {c.offload for c in members(Space(problem, {"offload": "optimizer"}))} == {"optimizer"}


def test_a_pinned_schedule_brings_its_stages_and_may_recompute(toys):
    problem = toys.problem(toys.graph(layers=8), toys.cluster(devices=2), global_batch=4)
    found = members(Space(problem, {"schedule": "ZBVZeroBubble", "microbatch_size": 1}))
    assert {(c.pp, c.stages_per_rank) for c in found} == {(2, 2)}
    assert {c.recompute for c in found} == {"none", "full", "half"}
    found = members(Space(problem, {"stages_per_rank": 4, "pp": 2}))
    assert {c.schedule for c in found} == {"Interleaved1F1B", "InterleavedZeroBubble"}


def test_divisors():
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]


@pytest.mark.parametrize(
    "fix, error, said",
    [
        ({"tp": 3}, PlanError, "heads divide by 1, 2, 4 only"),
        ({"pp": 5}, PlanError, "4 blocks make at most 4 stages"),
        ({"dp_shard": 8}, PlanError, "asks for 8 devices (pp x dp x tp); the cluster 'toy'"),
    ],
)
def test_pinned_values_that_no_candidate_has(toys, fix, error, said):
    with pytest.raises(error) as caught:
        Space(toys.problem(cluster=toys.cluster(nodes=1, devices=6)), fix)
    assert said in str(caught.value)


def test_an_empty_space_says_why(toys):
    space = Space(toys.problem(global_batch=10), {"dp_shard": 4})
    assert not members(space)
    assert "nearest: 8 or 12" in space.explain_empty()


def test_pinned_numbers_of_blocks(toys):
    """More than stages have as well: they run all of theirs again."""
    problem = toys.problem(toys.graph(layers=4), toys.cluster(devices=2))
    found = members(Space(problem, {"recompute_blocks": 9, "pp": 2}))
    assert {(c.recompute, c.recompute_blocks) for c in found} == {("full", 9), ("half", 9)}
    found = members(Space(problem, {"recompute_blocks": 0, "pp": 2}))
    assert {c.recompute_blocks for c in found} == {0}


def test_a_step_of_very_many_microbatches_is_not_offered(toys):
    space = Space(toys.problem(global_batch=8191), {})  # a prime: one microbatch, or 8191
    assert {group.microbatches for group in space.groups()} == {1}
    assert (
        "at most 4096 microbatches"
        in Space(
            toys.problem(global_batch=8191),
            {"microbatch_size": 1, "dp_shard": 1, "dp_replicate": 1},
        ).explain_empty()
    )


def test_what_cannot_be_divided_one_way_names_the_others(toys):
    """A U-Net: skips around every cut, and no linear feeds another."""
    graph = replace(
        toys.graph(),
        tp_divides=1,
        no_tensor_parallel="no linear of a block feeds another",
        cut_refused=dict.fromkeys(range(1, 6), "the output of down goes around it"),
    )
    for fix, said in (
        (
            {"tp": 2},
            "no tensor parallelism in this model: no linear of a block feeds another; pin tp=1",
        ),
        ({"pp": 2}, "no pipeline of this model: the output of down goes around it; pin pp=1"),
    ):
        with pytest.raises(PlanError) as caught:
            Space(toys.problem(graph, toys.cluster(devices=2)), fix)
        assert said in str(caught.value)
        assert str(caught.value).endswith("(dp_shard divides every model)")


def test_finer_knobs_are_left_out_of_large_spaces_unless_pinned(toys, monkeypatch):
    problem = toys.problem(toys.graph(layers=4), toys.cluster(nodes=2))
    small = Space(problem, {})
    assert small.left_out() == "" and {c.blocks_per_group for c in members(small)} == {1, 2, 4}
    monkeypatch.setattr("claw_plan.planner.space.MOST_REFINED", 10)
    large = Space(problem, {})
    for knob, only in (("recompute_blocks", 0), ("reshard_ranks", 0), ("blocks_per_group", 1)):
        assert {getattr(candidate, knob) for candidate in members(large)} == {only}
        assert knob in large.left_out()
    assert set(members(large)) < set(members(small))
    pinned = members(Space(problem, {"recompute_blocks": 2, "reshard_ranks": 2}))
    assert {(c.recompute_blocks, c.reshard_ranks) for c in pinned} == {(2, 2)}


def test_of_bucket_sizes_that_make_the_same_buckets_one_is_offered(toys):
    """24 MB of gradients in blocks of 4 MB: sizes of 25 MB and more are one."""
    graph = toys.graph(layers=6, width=1000)
    problem = toys.problem(graph, toys.cluster(devices=2), global_batch=2)
    fix = {"dp_replicate": 2, "collective": "auto", "offload": "none", "recompute": "none"}
    sizes = {c.bucket_bytes for c in members(Space(problem, fix))}
    assert sizes == {25_000_000, 5_000_000, 10_000_000}
    assert {c.bucket_bytes for c in members(Space(problem, fix | {"bucket_bytes": 7}))} == {7}
