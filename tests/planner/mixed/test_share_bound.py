"""No plan of a share is faster than its bound."""

from __future__ import annotations

from dataclasses import replace

import pytest

from claw_plan.planner.mixed.share_bound import ShareBounds
from claw_plan.planner.mixed.shares import Shares


@pytest.mark.parametrize("devices, layers", [(1, 2), (2, 3), (3, 3), (4, 5)])
def test_no_best_plan_is_faster_than_its_bound(toys, mixed_toys, devices, layers):
    kinds = [mixed_toys.ToyKind(devices=devices), mixed_toys.ToyKind(devices=1, flops_per_s=3e6)]
    graph = toys.graph(layers=layers, hidden=0, tied=False)
    shares = Shares(mixed_toys.mixed_scorer(toys, kinds, global_batch=12, graph=graph))
    for share in range(1, 13):
        best = shares.scorer.share_bounds[0].least_ns(share)
        found = shares.alone(0, share)
        assert found is not None and 0 < best <= found[0], share


def test_a_share_that_devices_do_not_divide_leaves_some_idle(toys):
    """Of 4 devices and one block that has no head to divide 5 samples use 1, as dp divides 5."""
    graph = toys.graph(layers=1, heads=1)
    cluster = toys.cluster(devices=4)
    least = {}
    for batch in (4, 5):
        problem = toys.problem(graph, cluster, global_batch=batch)
        least[batch] = ShareBounds(problem).least_ns(batch)
    assert least[5] == pytest.approx(5 * least[4], rel=1e-3)


def test_a_degree_that_divides_some_of_a_block_divides_no_sequence(toys):
    graph = toys.graph(layers=2)
    costs = {"plain": graph.costs["plain"], "tensor@2": graph.costs["tensor"]}
    partial = replace(graph, tp_divides=1, partial={2: ()}, costs=costs)
    problem = toys.problem(partial, toys.cluster(devices=2), global_batch=4)
    whole = toys.problem(graph, toys.cluster(devices=2), global_batch=4)
    assert ShareBounds(problem).least_ns(4) == ShareBounds(whole).least_ns(4) > 0
