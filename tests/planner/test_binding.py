"""What binds, and differences that add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.planner.binding import binding_of, difference, link_of
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.score import Scorer

WAYS = (
    Candidate(dp_replicate=4),
    Candidate(dp_shard=4, microbatch_size=2),
    Candidate(pp=2, dp_shard=2),
    Candidate(pp=4),
    Candidate(tp=4, microbatch_size=4),
)


@pytest.fixture(scope="module")
def scorer(toys):
    return Scorer(toys.problem(toys.graph(layers=4), toys.cluster(devices=4), global_batch=16))


def scored(scorer, candidate):
    return scorer.score(candidate, scorer.bounds.stage_path(candidate).cuts)


@pytest.mark.parametrize("candidate", WAYS)
def test_the_critical_path_adds_up_to_the_step(scorer, candidate):
    found = scored(scorer, candidate)
    binding = binding_of(scorer, found)
    assert sum(binding.parts_ns.values()) == found.step_time_ns
    assert binding.parts_ns[binding.binds] == max(binding.parts_ns.values())
    assert 0 < binding.fullest <= 1


@given(first=st.sampled_from(WAYS), second=st.sampled_from(WAYS))
def test_differences_add_up_to_that_of_the_steps(scorer, first, second):
    one, other = scored(scorer, first), scored(scorer, second)
    parts = difference(one, other)
    assert sum(parts.values()) == other.step_time_ns - one.step_time_ns
    assert difference(other, one) == {name: -ns for name, ns in parts.items()}


def test_one_device_is_bound_by_compute(scorer):
    binding = binding_of(scorer, scored(scorer, Candidate(microbatch_size=16)))
    assert binding.binds == "compute" and binding.link == ""


def test_traffic_is_told_with_its_link(toys):
    """Four devices a node: tp=4 stays inside, dp over two nodes does not."""
    problem = toys.problem(toys.graph(layers=4), toys.cluster(nodes=2, devices=4))
    assert link_of(problem, Candidate(tp=4, dp_shard=2), "tp") == "in"
    assert link_of(problem, Candidate(tp=4, dp_shard=2), "dp") == "out"
    assert link_of(problem, Candidate(dp_shard=4), "dp") == "in"
    assert link_of(problem, Candidate(pp=2, dp_shard=4), "pp") == "out"
    assert link_of(problem, Candidate(pp=2), "pp") == "in"
