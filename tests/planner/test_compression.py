"""Whether compressing gradients pays, against the same steps scored by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.compression import compression_said
from claw_plan.planner.score import Scorer
from claw_plan.profiles.codecs import describe_codec
from claw_plan.profiles.units import format_ns


@pytest.fixture
def judged(toys):
    """The sentences on a candidate, and its scorer."""

    def judge(candidate, *, inter_bytes_per_s=1e5, precision="float32"):
        cluster = toys.cluster(nodes=2, devices=1, inter_bytes_per_s=inter_bytes_per_s)
        graph = toys.graph(layers=4, width=64)
        problem = toys.problem(graph, cluster, global_batch=4, precision=precision)
        scorer = Scorer(problem)
        cuts = scorer.bounds.stage_path(candidate).cuts
        return list(compression_said(scorer, scorer.score(candidate, cuts))), scorer, cuts

    return judge


REPLICAS = Candidate(dp_replicate=2)


def test_where_gradients_wait_the_codec_that_is_through_first_is_named(judged):
    (said,), scorer, cuts = judged(REPLICAS)
    names = ("one_bit", "top_k", "fp16", "fp8", "int8", "int4")
    times = {n: scorer.step_time_ns(replace(REPLICAS, codec=n), cuts) for n in names}
    best = min(times, key=lambda name: times[name] * describe_codec(name).step_penalty)
    assert said.startswith("gradients wait ")
    assert f"; {best} would make the step {format_ns(times[best])}, " in said
    assert said.endswith(f"allow it with --codecs {best}")


def test_where_they_hardly_wait_nothing_is_said(judged):
    assert judged(REPLICAS, inter_bytes_per_s=1e9)[0] == []
    assert judged(Candidate())[0] == []


def test_a_chosen_codec_is_set_against_its_absence(judged):
    coded = replace(REPLICAS, codec="one_bit")
    (said,), scorer, cuts = judged(coded)
    assert said.startswith(
        f"one_bit pays: a step takes {format_ns(scorer.step_time_ns(coded, cuts))}"
    )
    (other,), *_ = judged(coded, inter_bytes_per_s=1e12)
    assert other.startswith("one_bit does not pay: ")


@pytest.mark.parametrize("candidate", [Candidate(dp_shard=2), REPLICAS])
def test_where_no_search_tries_codecs_the_plan_is_to_be_edited(judged, candidate):
    (said,), scorer, cuts = judged(candidate, precision="bfloat16")
    names = ("fp16", "fp8", "int8", "int4")
    times = {n: scorer.step_time_ns(replace(candidate, codec=n), cuts) for n in names}
    best = min(times, key=lambda name: times[name] * describe_codec(name).step_penalty)
    assert f"; {best} would make the step {format_ns(times[best])}, " in said
    assert said.endswith(f"write candidate.codec: {best} into the plan, which no search does here")


def test_where_no_codec_acts_it_is_said_why(judged):
    (scaled,), *_ = judged(REPLICAS, precision="float16")
    assert scaled.endswith("units of a loss scale that moves")
