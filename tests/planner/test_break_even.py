"""The rate below which a codec pays, against steps scored on clusters with such links."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from claw_plan.planner.break_even import (
    averaging_link,
    both_ns,
    break_even_bytes_per_s,
    kernels_ns,
    on_link,
)
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.score import Scorer

WAYS = [
    Candidate(dp_replicate=2),
    Candidate(dp_shard=2),
    Candidate(dp_replicate=2, pp=2, mesh_order=("dp_replicate", "dp_shard", "cp", "pp", "tp")),
]


def posed(toys, *, rate=1e5, nodes=2, devices=1, batch=4):
    cluster = toys.cluster(nodes=nodes, devices=devices, inter_bytes_per_s=rate)
    graph = toys.graph(layers=4, width=64)
    scorer = Scorer(toys.problem(graph, cluster, global_batch=batch, latency_ns=0))
    return scorer


def cuts_of(scorer, candidate):
    return scorer.bounds.stage_path(candidate).cuts


@pytest.mark.parametrize("candidate", WAYS)
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_it_pays_below_and_not_above(toys, candidate, codec):
    devices = candidate.num_devices // 2
    scorer = posed(toys, devices=devices)
    edge = break_even_bytes_per_s(scorer, (candidate, cuts_of(scorer, candidate)), codec)
    assert 0 < edge < inf
    for factor, is_gain in ((0.98, True), (1.02, False)):
        at = posed(toys, rate=factor * edge, devices=devices)
        cuts = cuts_of(at, candidate)
        coded = at.step_time_ns(replace(candidate, codec=codec), cuts)
        assert (coded < at.step_time_ns(candidate, cuts)) == is_gain


def test_what_sends_as_much_pays_nowhere(toys):
    """The toys price an all-reduce by its bytes once, and fp16 sends half of them twice."""
    scorer, candidate = posed(toys), Candidate(dp_replicate=2)
    choice = (candidate, cuts_of(scorer, candidate))
    assert break_even_bytes_per_s(scorer, choice, "fp16") == 0


def test_a_penalty_in_steps_lowers_it(toys):
    """One bit sends least, but needs 1 % more steps: its edge is where it saves that much."""
    scorer, candidate = posed(toys), Candidate(dp_replicate=2)
    choice = (candidate, cuts_of(scorer, candidate))
    edge = break_even_bytes_per_s(scorer, choice, "one_bit")
    coded, plain = both_ns(scorer, choice, "one_bit", edge / 1e5)
    assert coded * 1.01 == pytest.approx(plain, rel=0.01)


def test_what_is_left_without_a_link_are_kernels(toys):
    """Of int8, two ranks: 5 + 5 + 24 bytes to encode, the like for the mean, 13 to decode."""
    scorer, candidate = posed(toys), Candidate(dp_replicate=2)
    choice = (candidate, cuts_of(scorer, candidate))
    elements = 4 * 64 * 64 + 64 * 64
    mean = (2 * (5 + 12) + 8 + 34) / 2
    expected = (34 + mean + 13 + 4) * elements / 10
    assert kernels_ns(scorer, choice, "int8") == pytest.approx(expected, rel=0.05)


def test_links_inside_a_node_are_told_from_those_between(toys):
    scorer = posed(toys, devices=2)
    assert averaging_link(scorer.problem, Candidate(dp_replicate=2)).kind == "intra"
    link = averaging_link(scorer.problem, Candidate(dp_replicate=2, dp_shard=2))
    assert (link.kind, link.name, link.bytes_per_s) == ("inter", "out", 1e5)
    assert averaging_link(scorer.problem, Candidate(dp_shard=4)).kind == "inter"
    faster = on_link(scorer.problem, "intra", 4.0)
    node, was = faster.cluster.nodes[0], scorer.problem.cluster.nodes[0]
    assert (node.intra.bytes_per_s, node.nic) == (4 * was.intra.bytes_per_s, was.nic)
    slow, fast = (
        p.collective("all_reduce", 1000, 2, 1).alone_ns for p in (scorer.problem, faster)
    )
    assert slow == 4 * fast


def test_long_steps_are_played_on_idle_links(toys, monkeypatch):
    """On which a step of replicas alone lasts as long but for its end, the same with a codec."""
    scorer, candidate = posed(toys), Candidate(dp_replicate=2)
    choice = (candidate, cuts_of(scorer, candidate))
    simulated = break_even_bytes_per_s(scorer, choice, "int8")
    monkeypatch.setattr("claw_plan.planner.break_even.MOST_PASSES", 0)
    assert break_even_bytes_per_s(scorer, choice, "int8") == pytest.approx(simulated, rel=0.02)
