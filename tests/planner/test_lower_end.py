"""The end of a step: buckets as the executor packs them, and what meets where."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.executor.gradients import buckets
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.lower import lower
from claw_plan.planner.lower_end import bucket_sizes
from claw_plan.planner.score import Scorer
from claw_plan.simulator.simulate import simulate


@given(
    sizes=st.lists(st.integers(min_value=1, max_value=40)),
    bucket_bytes=st.integers(min_value=1, max_value=300),
)
def test_buckets_are_those_of_the_executor(sizes, bucket_bytes):
    packed = buckets([torch.zeros(size) for size in sizes], bucket_bytes)
    expected = [sum(t.nbytes for t in bucket) + 4 * len(bucket) for bucket in packed]
    assert list(bucket_sizes(sizes, bucket_bytes)) == expected


@pytest.mark.parametrize(
    "clip_norm, precision, met",
    [
        (None, "float32", ["loss"]),
        (1.0, "float32", ["norm", "loss"]),
        (1.0, "float16", ["overflow", "norm", "loss"]),
    ],
)
def test_all_ranks_meet_once_a_step_whatever_they_hold(toys, clip_norm, precision, met):
    """Two stages on each of two ranks: one norm and one loss a rank, together."""
    problem = toys.problem(toys.graph(layers=4), global_batch=4, precision=precision)
    problem = replace(problem, training=replace(problem.training, clip_norm=clip_norm))
    candidate = Candidate(pp=2, schedule="Interleaved1F1B", stages_per_rank=2)
    scorer = Scorer(problem)
    cuts = scorer.bounds.stage_path(candidate).cuts
    spans = simulate(lower(problem, scorer.shards, candidate, cuts).graph).spans
    for rank in range(2):
        own = [s for s in spans if s.rank == rank and s.name in ("overflow", "norm", "loss")]
        assert [span.name for span in own] == met
    for name in met:
        first, second = (span for span in spans if span.name == name)
        assert first.start_ns == second.start_ns
