"""Sentences that say why: each is checked against the figures it was made from."""

from __future__ import annotations

from dataclasses import replace

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.explain import infeasible, infeasible_message, reasons
from claw_plan.planner.score import Scorer
from claw_plan.planner.search_space import search_space
from claw_plan.planner.space import Space


def explained(problem, fix=None):
    scorer, space = Scorer(problem), Space(problem, fix or {})
    found = search_space(scorer, space)
    best = scorer.score(*found.ranked[0])
    return list(reasons(scorer, found, best)), best


def test_every_axis_left_out_has_a_reason(toys):
    sentences, best = explained(toys.problem(toys.graph(layers=4), toys.cluster(nodes=2)))
    used = {
        "pipeline parallelism": best.candidate.pp > 1,
        "tensor parallelism": best.candidate.tp > 1,
        "sharding (FSDP)": best.candidate.dp_shard > 1,
        "replication (DDP)": best.candidate.dp_replicate > 1,
        "recompute": best.candidate.recompute != "none",
    }
    for axis, is_used in used.items():
        assert any(sentence.startswith(axis) for sentence in sentences) != is_used, axis
    assert sentences[-1].startswith("what binds")


def test_devices_that_only_slow_down_are_left_out(toys):
    """Between nodes a byte takes 0.1 s, so the second node costs more than it brings."""
    cluster = toys.cluster(nodes=2, devices=1, inter_bytes_per_s=10.0)
    sentences, best = explained(toys.problem(toys.graph(layers=4), cluster))
    assert best.candidate.num_devices == 1
    assert any(s.startswith("1 of 2 devices are not used") for s in sentences)


def test_what_is_missing_and_where(toys):
    """On one device of 9,000 bytes: 16 bytes for each of 768 elements do not fit."""
    cluster = toys.cluster(devices=1, memory_bytes=9_000, kind="cpu")
    problem = toys.problem(toys.graph(layers=4, hidden=0), cluster)
    scorer, space = Scorer(problem), Space(problem, {})
    found = search_space(scorer, space)
    assert not found.ranked
    message = infeasible_message(scorer, found)
    least = min(
        stage.peak_bytes
        for candidate, cuts in found.pruned
        for stage in scorer.memory.stages(candidate, cuts)
    )
    assert f"needs {least / 1024:.1f} KiB on stage 0" in message
    assert f"{(least - 9_000) / 1024:.1f} KiB are missing" in message
    fitting = [
        shards
        for shards in (2, 4, 8)
        if scorer.memory.stage(Candidate(dp_shard=shards), 0, 0, 6).fits
    ]
    assert f"it would fit on {fitting[0]} such devices (dp_shard={fitting[0]}," in message


def test_levers_are_told_with_what_they_leave_missing(toys):
    cluster = toys.cluster(devices=2, memory_bytes=9_000)
    problem = toys.problem(toys.graph(layers=4, hidden=0), cluster, global_batch=4)
    scorer, space = Scorer(problem), Space(problem, {"tp": 1, "pp": 1, "dp_shard": 1})
    found = search_space(scorer, space)
    assert not found.ranked
    error = infeasible(scorer, found)
    assert error.levers and str(error).startswith(infeasible_message(scorer, found))
    for change, missing in error.levers.items():
        said = f"{change} would do" if not missing else f"{change} leaves"
        assert said in str(error)


def test_where_pairs_of_devices_differ_the_order_that_uses_fast_ones_is_said(toys):
    """Of four devices 0 and 2 have a link ten times as fast, and so have 1 and 3."""
    cluster = toys.cluster(devices=4)
    (node,) = cluster.nodes
    fast = replace(node.intra, bytes_per_s=10 * node.intra.bytes_per_s)
    uneven = replace(cluster, nodes=(replace(node, pairs={(0, 2): fast, (1, 3): fast}),))
    fix = {"tp": 2, "dp_replicate": 2, "collective": "auto"}
    sentences, _ = explained(toys.problem(toys.graph(layers=2), uneven), fix)
    assert any("CUDA_VISIBLE_DEVICES=0,2,1,3 on each, tp groups" in said for said in sentences)
    plain, _ = explained(toys.problem(toys.graph(layers=2), cluster), fix)
    assert not any("CUDA_VISIBLE_DEVICES" in said for said in plain)
