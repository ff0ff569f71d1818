"""The mean of both kinds of steps, and a score that is it."""

from __future__ import annotations

from dataclasses import replace

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.compression import compression_said
from claw_plan.planner.score import Scorer
from claw_plan.planner.space import Space
from claw_plan.planner.zero_one import AWAY_BYTES, is_zero_one, longest_away, mean_ns
from claw_plan.profiles.units import format_ns

MEETS = Candidate(dp_replicate=2, codec="zero_one:8")


def test_one_of_the_steps_is_a_meeting():
    assert is_zero_one(MEETS) and not is_zero_one(replace(MEETS, codec="one_bit"))
    assert longest_away(MEETS) == 8 and longest_away(replace(MEETS, codec="zero_one")) == 4
    assert mean_ns(MEETS, 100, 20) == (100 + 7 * 20) // 8
    assert mean_ns(replace(MEETS, codec="zero_one:1"), 100, 20) == 100


def test_a_step_takes_the_mean_and_parts_add_up_to_it(toys):
    problem = toys.problem(toys.graph(layers=4), toys.cluster(devices=2))
    scorer = Scorer(problem)
    path = scorer.bounds.stage_path(MEETS)
    one_bit = scorer.step_time_ns(replace(MEETS, codec="one_bit"), path.cuts)
    result = scorer.score(MEETS, path.cuts)
    apart = scorer.apart(MEETS, path.cuts).step_time_ns
    # Beside what travels only kernels of the optimizer differ.
    assert apart < one_bit < result.timeline.step_time_ns
    assert result.step_time_ns == (result.timeline.step_time_ns + 7 * apart) // 8
    assert result.step_time_ns == scorer.step_time_ns(MEETS, path.cuts)
    assert abs(sum(result.parts_ns.values()) - result.step_time_ns) <= len(result.parts_ns)
    bounds = scorer.bounds
    assert bounds.candidate_ns(MEETS, path) <= result.step_time_ns
    assert bounds.candidate_ns(MEETS, path) > 0.9 * result.step_time_ns
    (said,) = compression_said(scorer, result)
    meeting = format_ns(result.timeline.step_time_ns)
    assert f" on average ({meeting} where replicas meet, one of 8 steps, and " in said


def test_weights_moves_and_rates_are_kept_beside_one_bits_errors(toys):
    scorer = Scorer(toys.problem(toys.graph(layers=4), toys.cluster(devices=2)))
    cuts = scorer.bounds.stage_path(MEETS).cuts
    apart, one_bit = (
        scorer.memory.stages(replace(MEETS, codec=codec), cuts)[0].parts["residuals"]
        for codec in ("zero_one", "one_bit")
    )
    elements = sum(p.numel for p in scorer.problem.graph.parameters if p.trainable)
    assert apart - one_bit == AWAY_BYTES * elements == 12 * elements


def test_only_adamw_is_offered_it(toys):
    problem = toys.problem(toys.graph(layers=4), toys.cluster(devices=2))
    sgd = replace(problem, training=replace(problem.training, optimizer="sgd"))
    for asked, offered in ((problem, True), (sgd, False)):
        space = Space(asked, {}, ("zero_one",))
        found = {c.codec for group in space.groups() for c in space.members(group)}
        assert ("zero_one" in found) == offered
