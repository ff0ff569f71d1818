"""Times of passes: kernels and exchanges in order, kept for the next question."""

from __future__ import annotations

from dataclasses import replace

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.graph import PLAIN, SEQUENCE, TENSOR
from claw_plan.planner.problem import variant_of
from claw_plan.planner.score import Scorer


def test_a_pass_is_kernels_then_exchange(toys):
    problem = toys.problem()
    time = problem.pass_time(1, TENSOR, 2, 2, backward=True)
    (before, exchange), (after, nothing) = time.steps
    assert (before, after, nothing) == (2 * 1000 * 2 * 1000 // 2, 0, None)
    assert exchange is not None and exchange.bytes == 200
    assert time.exchange_ns == 5000 + 200_000  # 200 bytes at 1e6 bytes/s
    assert time.total_ns == time.compute_ns + time.exchange_ns
    assert time.source_ns == {"analytic": time.compute_ns}


def test_a_group_wider_than_a_node_crosses_the_network(toys):
    problem = toys.problem(cluster=toys.cluster(nodes=2, devices=2))
    links = [problem.pass_time(1, TENSOR, 1, tp, backward=False).steps[0][1].link for tp in (2, 4)]
    assert links == ["intra", "inter"]


def test_equal_units_are_timed_once(toys):
    problem = toys.problem()
    assert problem.pass_time(1, PLAIN, 1, 1, False) is problem.pass_time(2, PLAIN, 1, 1, False)


def test_variants():
    assert [
        variant_of(Candidate(tp=tp, sequence_parallel=sequence))
        for tp, sequence in ((1, False), (2, False), (2, True))
    ] == [PLAIN, TENSOR, SEQUENCE]


def test_a_mixed_cluster_is_as_slow_as_its_slowest_device_and_as_small_as_its_smallest(toys):
    cluster = toys.cluster(nodes=2)
    slow = replace(cluster.nodes[0].device, peak_flops_per_s={"float32": 5e5})
    small = replace(cluster.nodes[1].device, memory_bytes=5000)
    nodes = tuple(
        replace(node, device=device)
        for node, device in zip(cluster.nodes, (slow, small), strict=True)
    )
    problem = toys.problem(cluster=replace(cluster, nodes=nodes))
    assert problem.device is slow
    memory = Scorer(problem).memory.stage(Candidate(), 0, 0, 6)
    assert memory.capacity_bytes == 5000
