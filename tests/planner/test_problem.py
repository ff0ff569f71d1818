"""Times of passes: kernels and exchanges in order, kept for the next question."""

from __future__ import annotations

from dataclasses import replace

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.graph import PLAIN, SEQUENCE, TENSOR, Exchange
from claw_plan.planner.problem import Problem, variant_of
from claw_plan.planner.score import Scorer
from claw_plan.profiles.trainer import Trainer


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


def test_a_trainers_factors_act_on_exchanges_and_data_parallel_traffic_apart(toys):
    plain = toys.problem()
    slow = Problem(
        graph=plain.graph, cluster=plain.cluster, cost=plain.cost, training=plain.training,
        trainer=Trainer(name="t", tp_scale=3.0, dp_scale=2.0, step_ns=7000.0),
    )  # fmt: skip
    exchange = [p.pass_time(1, TENSOR, 2, 2, backward=True).exchange_ns for p in (plain, slow)]
    assert exchange[1] == pytest.approx(3 * exchange[0], abs=1)  # rounded up
    by_data = [
        p.collective("all_reduce", 1000, 4, 1, by_data=True).alone_ns for p in (plain, slow)
    ]
    other = [p.collective("all_reduce", 1000, 4, 1).alone_ns for p in (plain, slow)]
    assert by_data == [1_005_000, pytest.approx(2 * 1_005_000, abs=1)] and other[0] == other[1]
    assert (plain.step_overhead_ns(), slow.step_overhead_ns()) == (0, 7000)


def test_exchanges_run_over_the_group_of_their_axis(toys):
    """The toy's all-reduce, as one of contexts that lie on both nodes."""
    graph = toys.graph()
    costs = {
        variant: tuple(
            replace(
                cost,
                forward=tuple(
                    replace(item, axis="cp") if isinstance(item, Exchange) else item
                    for item in cost.forward
                ),
            )
            for cost in each
        )
        for variant, each in graph.costs.items()
    }
    problem = toys.problem(replace(graph, costs=costs), toys.cluster(nodes=2))
    time = problem.pass_time(1, TENSOR, 1, 2, False, (("cp", 8, 2),))
    assert time.axes == ("cp",) and time.steps[0][1].link == "inter"
