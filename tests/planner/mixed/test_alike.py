"""All divided alike over unlike devices: as slow as the slowest, and no tp group across kinds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from claw_plan.planner.errors import PlanError
from claw_plan.planner.mixed.alike import kept_apart, slowest_for_all
from claw_plan.planner.score import Scorer
from claw_plan.planner.space import Space


def problem_of(toys, mixed_toys, ratio: float, **kind):
    kinds = [mixed_toys.ToyKind(**kind), mixed_toys.ToyKind(flops_per_s=ratio * 1e6, **kind)]
    graph = toys.graph(layers=4, heads=4)
    return mixed_toys.mixed_scorer(toys, kinds, graph=graph).problem.whole


def test_every_rank_is_as_slow_as_the_slowest_wherever_it_lies(toys, mixed_toys):
    whole = problem_of(toys, mixed_toys, 2)
    slowest = slowest_for_all(whole)
    assert slowest.quickest is slowest is slowest.among([1])
    ns = [
        each.pass_time(1, "plain", 1, 1, backward=False).compute_ns
        for each in (whole.among([1]), whole, slowest)
    ]
    assert 2 * ns[0] == ns[1] == ns[2]


def test_no_plan_is_slower_where_each_rank_counts_with_its_own_nodes(toys, mixed_toys):
    whole = problem_of(toys, mixed_toys, 3)
    slowest = Scorer(slowest_for_all(whole))
    own, quicker = Scorer(whole), 0
    space = Space(whole, {})
    for group in list(space.groups())[::20]:
        candidate = space.members(group)[0]
        cuts = slowest.bounds.stage_path(candidate).cuts
        times = slowest.step_time_ns(candidate, cuts), own.step_time_ns(candidate, cuts)
        assert times[1] <= times[0]
        quicker += times[1] < times[0]
    assert quicker


def test_equal_devices_are_left_as_they_are(toys):
    problem = toys.problem()
    assert slowest_for_all(problem) is problem


@pytest.mark.parametrize("ratio, degrees", [(1.29, [1, 2, 4]), (1.31, [1, 2])])
def test_tensor_parallel_groups_hold_devices_within_30_percent(toys, mixed_toys, ratio, degrees):
    """Two devices a node: a group of four would lie on both nodes."""
    apart = kept_apart(problem_of(toys, mixed_toys, ratio), {})
    assert Space(apart, {}).tp_degrees() == degrees


def test_degrees_that_divide_some_of_a_block_stay_within_a_node_too(toys, mixed_toys):
    whole = problem_of(toys, mixed_toys, 2)
    graph = replace(whole.graph, tp_divides=1, partial={2: (), 4: ()})
    apart = kept_apart(replace(whole, graph=graph), {})
    assert Space(apart, {}).tp_degrees() == [1, 2]


def test_a_pinned_degree_across_kinds_is_refused(toys, mixed_toys):
    whole = problem_of(toys, mixed_toys, 2)
    kept_apart(whole, {"tp": 2})
    with pytest.raises(PlanError, match=r"d0 and d1, which is 100% faster.*node_profile"):
        kept_apart(whole, {"tp": 4})


def test_nodes_that_the_user_groups_are_one_kind(toys, mixed_toys):
    whole = problem_of(toys, mixed_toys, 2)
    nodes = tuple(replace(node, profile="all") for node in whole.cluster.nodes)
    grouped = replace(whole, cluster=replace(whole.cluster, nodes=nodes))
    (kind,) = mixed_toys.kinds_of(grouped, mixed_toys.ToyMixedCost)
    assert (kind.name, kind.nodes, kind.num_devices) == ("all", (0, 1), 4)
    assert kind.problem.among([1]) is kind.problem
    apart = tuple(replace(node, profile=f"p{n}") for n, node in enumerate(nodes))
    equal = replace(whole, cluster=replace(whole.cluster, nodes=(apart[0], apart[1], apart[1])))
    several = mixed_toys.kinds_of(equal, mixed_toys.ToyMixedCost)
    assert [kind.nodes for kind in several] == [(0,), (1, 2)]
