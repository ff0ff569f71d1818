"""Shares of a unit's backward, by hand, and where buckets leave by them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.gradient_times import (
    launch_shares,
    ready_shares,
    with_recorded_gradients,
)
from claw_plan.planner.planned import on_cluster
from claw_plan.profiles.gradient_times import GradientTimes
from claw_plan.profiles.profile import Profile

LAYERS = 3


def graph_of(toys):
    """A table and a head, and two tensors in each of three blocks."""
    graph = toys.graph(layers=LAYERS, tied=False)
    table, *blocks = graph.parameters
    twins = [replace(p, names=(f"{p.name}.twin",)) for p in blocks]
    head = replace(table, names=("head",), units=(LAYERS + 1,))
    pairs = [one for pair in zip(blocks, twins, strict=True) for one in pair]
    return replace(graph, parameters=(table, *pairs, head))


def times_of(graph, **known):
    """In the order of the backward every 10 ns, but for what is known."""
    names = [p.name for p in reversed(graph.parameters)]
    times = {name: 10 * (place + 1) for place, name in enumerate(names)}
    return times | {name.replace("__", "."): ns for name, ns in known.items()}


def test_a_gradient_lies_between_the_ends_of_two_units(toys):
    """The head at 10; block 2 from there to 30, its twin at 20; the table's unit ends at 80."""
    graph = graph_of(toys)
    shares = ready_shares(graph, times_of(graph))
    assert shares["head"] == 1.0
    assert (shares["blocks.2.weight.twin"], shares["blocks.2.weight"]) == (0.5, 1.0)
    assert (shares["blocks.0.weight.twin"], shares["blocks.0.weight"]) == (0.5, 1.0)
    assert shares["embedding"] == 1.0


def test_a_gradient_before_all_of_the_unit_before_counts_from_its_end(toys):
    graph = graph_of(toys)
    times = times_of(graph) | {"blocks.1.weight.twin": 5}
    assert ready_shares(graph, times)["blocks.1.weight.twin"] == 0.0


@given(st.lists(st.integers(0, 1000), min_size=2 * LAYERS + 2, max_size=2 * LAYERS + 2))
def test_shares_are_shares_and_each_unit_ends_with_one(toys, times):
    graph = graph_of(toys)
    names = [p.name for p in graph.parameters]
    shares = ready_shares(graph, dict(zip(names, times, strict=True)))
    assert shares.keys() == set(names)
    assert all(0 <= share <= 1 for share in shares.values())


@pytest.mark.parametrize(
    ("buckets", "order", "shares"),
    [
        ((8,), (), (1.0,)),
        # head and block 2's twin | block 2's other and block 1's twin | ...
        ((2, 2, 2, 2), (), (0.5, 0.5, 0.5, 1.0)),
        ((1, 2, 5), (), (1.0, 1.0, 1.0)),
        # The last bucket first holds back all others to the end of its own unit.
        ((2, 2, 2, 2), (3, 0, 1, 2), (1.0, 1.0, 1.0, 1.0)),
    ],
)
def test_a_bucket_leaves_with_its_last_gradient_and_those_before(toys, buckets, order, shares):
    graph = graph_of(toys)
    held = [(p, p.numel) for p in graph.parameters]
    candidate = Candidate(buckets=buckets, bucket_order=order)
    assert launch_shares(held, candidate, ready_shares(graph, times_of(graph))) == shares
    assert launch_shares(held, candidate, {}) == ()
    assert launch_shares(held, Candidate(), ready_shares(graph, times_of(graph))) == ()


def test_the_newest_run_of_this_model_counts(toys):
    graph = graph_of(toys)

    def recorded(times):
        return GradientTimes(device="toy", microbatch_size=1, ready_ns=times)

    other = recorded({"other": 3})
    old, new = recorded(times_of(graph)), recorded(times_of(graph, blocks__2__weight__twin=25))
    profile = Profile(gradients=(old, new, other))
    found = with_recorded_gradients(graph, profile)
    assert found.ready_shares["blocks.2.weight.twin"] == 0.75
    assert with_recorded_gradients(found, None) == graph
    assert with_recorded_gradients(graph, Profile(gradients=(other,))) is graph


def test_a_plan_scored_under_a_profile_knows_of_its_runs(toys):
    problem = toys.problem(graph_of(toys))
    times = GradientTimes(device="toy", microbatch_size=1, ready_ns=times_of(problem.graph))
    known = on_cluster(problem, toys.cluster(kind="cpu"), Profile(gradients=(times,)))
    assert known.graph.ready_shares["blocks.2.weight.twin"] == 0.5
    assert not on_cluster(known, toys.cluster(kind="cpu"), None).graph.ready_shares
