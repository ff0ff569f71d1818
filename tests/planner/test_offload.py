"""The host's step by the formula with numbers put in by hand."""

from __future__ import annotations

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.lower import lower
from claw_plan.planner.memory_states import held_parts
from claw_plan.planner.offload import host_step_ns
from claw_plan.planner.problem import optimizer_work
from claw_plan.planner.score import Scorer
from claw_plan.planner.shards import ShardSizes
from claw_plan.simulator.simulate import simulate

ELEMENTS = 64 * 8 + 4 * 8 * 8


def test_copies_and_the_hosts_memory_shared_by_a_nodes_ranks(toys):
    problem = toys.problem(cluster=toys.cluster(devices=4))
    # 12 B over 25 GB/s, and four ranks' 84 B over 300 GB/s
    assert host_step_ns(problem, 1_000_000) == round(1e6 * (12 / 25 + 4 * 84 / 300))


def test_on_cpus_only_the_copies_are_added(toys):
    problem = toys.problem(cluster=toys.cluster(devices=2, kind="cpu"))
    step = problem.cost.op(optimizer_work("adamw", 1000)).ns
    assert host_step_ns(problem, 1000) == step + problem.memory_op_ns(24_000)


def test_a_step_is_lowered_with_it_and_stays_above_its_bound(toys):
    problem = toys.problem(toys.graph(layers=4), global_batch=2)
    scorer = Scorer(problem)
    candidate = Candidate(dp_shard=2, offload="optimizer")
    path = scorer.bounds.stage_path(candidate)
    timeline = simulate(lower(problem, scorer.shards, candidate, path.cuts).graph)
    [duration_ns] = [s.end_ns - s.start_ns for s in timeline.spans if s.name == "on the host"]
    assert duration_ns == host_step_ns(problem, ELEMENTS // 2)
    assert scorer.bounds.candidate_ns(candidate, path) <= scorer.step_time_ns(candidate, path.cuts)


def test_states_leave_the_device_and_a_cpu_holds_the_copies_too(toys):
    everything = ((0, 6),)
    for kind, states in (("cuda", 0), ("cpu", 4)):
        problem = toys.problem(cluster=toys.cluster(devices=2, kind=kind))
        shards = ShardSizes(problem.graph)
        parts = held_parts(problem, shards, Candidate(offload="optimizer"), everything)
        assert parts["optimizer"] == 4 * states * ELEMENTS
        assert parts["parameters"] == 4 * ELEMENTS
