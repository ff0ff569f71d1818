"""Unlike pipelines as tasks; on equal devices they are exactly what every other pipeline is."""

from __future__ import annotations

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.mixed.lower import BETWEEN, lower_mixed, num_hosts
from claw_plan.planner.mixed.plan import MixedCandidate, MixedRank, Pipeline, pipeline_on
from claw_plan.planner.score import Scorer
from claw_plan.simulator.simulate import simulate

MS = 1_000_000


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(dp_shard=4, tp=2),
        Candidate(pp=4, dp_shard=2),
        Candidate(pp=2, dp_replicate=2, tp=2),
        Candidate(pp=3, tp=2, microbatch_size=2, recompute="full"),
        Candidate(pp=2, schedule="Interleaved1F1B", stages_per_rank=2, dp_shard=2, zero=1),
        Candidate(pp=2, schedule="ZBVZeroBubble", stages_per_rank=2),
    ],
)
def test_on_one_kind_it_is_the_plan_on_equal_devices(toys, mixed_toys, candidate):
    scorer = mixed_toys.mixed_scorer(
        toys, [mixed_toys.ToyKind(nodes=4)], global_batch=16, graph=toys.graph(layers=6)
    )
    alike = Scorer(scorer.problem.kinds[0].problem)
    cuts = alike.bounds.stage_path(candidate).cuts
    mixed = MixedCandidate(pipelines=(pipeline_on(0, candidate, cuts, 16),))
    whole, other = alike.score(candidate, cuts), scorer.score(mixed)
    assert other.step_time_ns == whole.step_time_ns
    assert other.memory == whole.memory
    assert other.parts_ns == whole.parts_ns
    assert other.timeline.memory == whole.timeline.memory


def two_stages(slow: Candidate, fast: Candidate, batch: int, cut: int, units: int):
    ranks = (
        MixedRank(kind=0, place=0, candidate=slow),
        MixedRank(kind=1, place=0, candidate=fast),
    )
    return Pipeline(batch=batch, ranks=ranks, cuts=((0, cut), (cut, units)))


def test_each_stage_computes_at_the_rate_of_its_kind(toys, mixed_toys):
    """Four blocks of 1 + 2 ms: one on the slow device, three on the one three times as fast."""
    graph = toys.graph(layers=4, hidden=0, tied=False, ends=False)
    kinds = [mixed_toys.ToyKind(devices=1), mixed_toys.ToyKind(devices=1, flops_per_s=3e6)]
    scorer = mixed_toys.mixed_scorer(toys, kinds, global_batch=8, graph=graph)
    pipeline = two_stages(Candidate(pp=2), Candidate(pp=2), 8, 2, 6)
    lowered = lower_mixed(scorer.problem, scorer.shards, MixedCandidate(pipelines=(pipeline,)))
    spans = simulate(lowered.graph).spans
    forward = {s.rank: s.duration_ns for s in spans if s.kind == "forward"}
    assert forward == {0: MS, 1: 999_999}  # three times 333,333
    assert num_hosts(scorer.problem, MixedCandidate(pipelines=(pipeline,))) == 2


def test_a_message_between_kinds_takes_the_slower_port(toys, mixed_toys):
    """100 bytes a sample over 1e5 and 1e4 bytes a second, and 5 us of latency."""
    graph = toys.graph(layers=2, tied=False)
    kinds = [mixed_toys.ToyKind(devices=1), mixed_toys.ToyKind(devices=1, nic_bytes_per_s=1e4)]
    scorer = mixed_toys.mixed_scorer(toys, kinds, global_batch=2, graph=graph)
    pipeline = two_stages(Candidate(pp=2), Candidate(pp=2), 2, 2, 4)
    lowered = lower_mixed(scorer.problem, scorer.shards, MixedCandidate(pipelines=(pipeline,)))
    sends = [s.duration_ns for s in simulate(lowered.graph).spans if s.kind == "pp_comm"]
    assert sends == [10 * MS + 5000] * 4


def two_kinds(toys, mixed_toys, candidate, *, batches, graph=None, **slow):
    kinds = [
        mixed_toys.ToyKind(devices=candidate.num_devices, **slow),
        mixed_toys.ToyKind(devices=candidate.num_devices, flops_per_s=2e6, nic_bytes_per_s=1e6),
    ]
    scorer = mixed_toys.mixed_scorer(toys, kinds, global_batch=sum(batches), graph=graph)
    units = len(scorer.problem.whole.graph.units)
    pipelines = tuple(
        pipeline_on(kind, candidate, ((0, units),), batch) for kind, batch in enumerate(batches)
    )
    lowered = lower_mixed(scorer.problem, scorer.shards, MixedCandidate(pipelines=pipelines))
    return simulate(lowered.graph).spans


def test_gradients_of_pipelines_are_summed_once_both_are_there(toys, mixed_toys):
    """Two kinds, each with all parameters: 64 x 8 + 4 x 8 x 8 of them in fp32."""
    spans = two_kinds(toys, mixed_toys, Candidate(), batches=(2, 4))
    sums = [span for span in spans if span.name == BETWEEN]
    ends = [max(s.end_ns for s in spans if s.rank == r and s.kind == "backward") for r in (0, 1)]
    assert {span.start_ns for span in sums} == {max(ends)}
    size_bytes = 4 * (64 * 8 + 4 * 8 * 8)
    assert {s.duration_ns for s in sums} == {size_bytes * 10_000 + 5000}  # the slow port's
    assert sorted(span.rank for span in sums) == [0, 1]


def test_sums_between_kinds_run_beside_the_last_backward(toys, mixed_toys):
    """Two devices a kind: shards of 8 x 8 / 2 elements of every block, each a bucket of its own.

    A block's sum begins when the slower kind has reduced its gradient, or the sum before ends.
    """
    graph = toys.graph(layers=3, hidden=0, tied=False)
    candidate = Candidate(dp_shard=2, bucket_bytes=128)
    spans = two_kinds(toys, mixed_toys, candidate, batches=(4, 4), graph=graph)
    names = ("unit 3", "unit 2", "unit 1", "root")
    reduced = [max(s.end_ns for s in spans if s.name == f"reduce {name}") for name in names]
    for rank in (0, 1):
        sums = [s for s in spans if s.rank == rank and s.name == BETWEEN]
        assert [s.duration_ns for s in sums[:3]] == [128 * 10_000 + 5000] * 3
        ends = [0, *(s.end_ns for s in sums)]
        assert [s.start_ns for s in sums] == list(map(max, reduced, ends[:4]))
        steps = [s.start_ns for s in spans if s.rank == rank and s.kind == "optimizer"]
        assert min(steps) >= max(ends)
    last_pass = max(s.end_ns for s in spans if s.kind == "backward")
    assert sum(s.start_ns < last_pass for s in spans if s.name == BETWEEN) >= 4


def test_replicas_average_before_kinds_sum(toys, mixed_toys):
    spans = two_kinds(
        toys, mixed_toys, Candidate(dp_replicate=2), batches=(4, 4),
        graph=toys.graph(layers=2, hidden=100, tied=False),
    )  # fmt: skip
    sums = [span for span in spans if span.name == BETWEEN and span.rank == 0]
    means = [span for span in spans if span.name == "bucket"]
    assert sums and min(s.start_ns for s in sums) >= max(s.end_ns for s in means)
