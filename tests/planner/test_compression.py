"""Whether compressing gradients pays, against the same steps scored by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from claw_plan.planner.break_even import break_even_bytes_per_s
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.compression import compression_said
from claw_plan.planner.score import Scorer
from claw_plan.planner.supported import CODECS, refusal
from claw_plan.profiles.codecs import describe_codec
from claw_plan.profiles.units import format_bits_per_s, format_ns


@pytest.fixture
def judged(toys):
    """The sentences on a candidate, and its scorer."""

    def judge(candidate, *, inter_bytes_per_s=1e5, precision="float32", named=(), clip=None):
        cluster = toys.cluster(nodes=2, devices=1, inter_bytes_per_s=inter_bytes_per_s)
        graph = toys.graph(layers=4, width=64)
        problem = toys.problem(graph, cluster, global_batch=4, precision=precision)
        training = replace(problem.training, clip_norm=clip)
        scorer = Scorer(replace(problem, training=training))
        cuts = scorer.bounds.stage_path(candidate).cuts
        return list(compression_said(scorer, scorer.score(candidate, cuts), named)), scorer, cuts

    return judge


REPLICAS = Candidate(dp_replicate=2)
FAST = 1e9


def times_of(scorer, candidate, cuts, names):
    return {n: scorer.step_time_ns(replace(candidate, codec=n), cuts) for n in names}


def first_of(times):
    return min(times, key=lambda name: times[name] * describe_codec(name).step_penalty)


def test_where_gradients_wait_the_codec_that_is_through_first_is_named(judged):
    (said,), scorer, cuts = judged(REPLICAS)
    offered = [n for n in CODECS if n != "threshold" and not refusal(replace(REPLICAS, codec=n))]
    times = times_of(scorer, REPLICAS, cuts, offered)
    best = first_of(times)
    assert said.startswith("gradients wait ")
    assert f"; {best} would make the step {format_ns(times[best])}, " in said
    assert said.endswith(f"allow it with --codecs {best}")


def test_where_they_hardly_wait_nothing_is_said_unless_codecs_are_named(judged):
    assert judged(REPLICAS, inter_bytes_per_s=1e9)[0] == []
    assert judged(Candidate())[0] == []
    (said,), scorer, cuts = judged(REPLICAS, inter_bytes_per_s=FAST, named=("int8", "int4"))
    times = times_of(scorer, REPLICAS, cuts, ("int8", "int4"))
    best = first_of(times)
    plain = scorer.step_time_ns(REPLICAS, cuts)
    steps = f"a step of {format_ns(times[best])} instead of {format_ns(plain)}"
    assert f"compressing them does not pay: {best}, the best, makes {steps}, of which" in said
    edge = break_even_bytes_per_s(scorer, (REPLICAS, cuts), best)
    here = f"of out (here {format_bits_per_s(FAST)} a device)"
    assert said.endswith(f"; it pays below {format_bits_per_s(edge)} {here}")


def test_steps_to_the_same_loss_are_told_with_their_source(judged):
    (said,), *_ = judged(REPLICAS, named=("one_bit",))
    assert "and 1.0% more steps to the same loss (docs/compressed_training.md)" in said
    (said,), *_ = judged(REPLICAS, named=("int8",))
    assert "as many steps to the same loss, as far as measured" in said


def test_a_chosen_codec_is_set_against_its_absence(judged):
    coded = replace(REPLICAS, codec="one_bit")
    (said,), scorer, cuts = judged(coded)
    assert said.startswith(
        f"one_bit pays: a step takes {format_ns(scorer.step_time_ns(coded, cuts))}"
    )
    (other,), *_ = judged(coded, inter_bytes_per_s=FAST)
    assert other.startswith("one_bit does not pay: ")


@pytest.mark.parametrize("candidate", [Candidate(dp_shard=2), REPLICAS])
def test_shards_and_lower_precisions_are_allowed_codecs_of_gradients(judged, candidate):
    (said,), scorer, cuts = judged(candidate, precision="bfloat16")
    times = times_of(scorer, candidate, cuts, ("fp16", "fp8", "int8", "int4"))
    best = first_of(times)
    assert f"; {best} would make the step {format_ns(times[best])}, " in said
    assert said.endswith(f"allow it with --codecs {best}")


def test_where_no_codec_acts_it_is_said_why(judged):
    (scaled,), *_ = judged(REPLICAS, precision="float16")
    assert scaled.endswith("of a loss scale that moves; use --precision bf16 or fp32")
    (clipped,), *_ = judged(REPLICAS, named=("one_bit",), clip=1.0)
    assert "no codec can be used here: codec=one_bit: no rank has the mean gradient" in clipped
