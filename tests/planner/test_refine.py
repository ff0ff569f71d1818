"""What is refined is judged by the score, and never made worse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.errors import PlanError
from claw_plan.planner.per_layer_costs import layer_choices
from claw_plan.planner.policy_search import pretrain, save_policy
from claw_plan.planner.refine import PlanChoices, SearchSettings, layer_gain, refine
from claw_plan.planner.score import Scorer


def piped(toys, layers=6, **problem):
    """Two stages, the last with a head twice as dear as a block, badly cut."""
    scorer = Scorer(toys.problem(toys.graph(layers=layers), toys.cluster(devices=2), **problem))
    units = layers + 2
    return scorer, (Candidate(pp=2), ((0, 2), (2, units)))


def best_cut(scorer, base):
    """Every cut into two, simulated."""
    units = base[1][-1][1]
    tried = [((0, at), (at, units)) for at in range(2, units - 1)]
    return min(scorer.step_time_ns(base[0], cuts) for cuts in tried)


@pytest.mark.parametrize("searcher", ["auto", "exhaustive", "anneal", "nsga2"])
def test_a_bad_cut_is_moved_to_the_best(toys, searcher):
    scorer, base = piped(toys)
    fix = {"recompute": "none", "blocks_per_group": 1}
    refined = refine(scorer, base, fix, SearchSettings(searcher))
    after = scorer.step_time_ns(*refined.choice)
    # Seven places are within reach, fewer than the budget: any searcher tries them all.
    assert after == best_cut(scorer, base) < scorer.step_time_ns(*base)
    assert "faster with stages from unit 0, " in refined.sentences[0]


def test_without_a_search_nothing_changes(toys):
    scorer, base = piped(toys)
    refined = refine(scorer, base, {}, SearchSettings())
    assert refined.choice == base and refined.sentences == ()
    with pytest.raises(PlanError, match="belong to a --search"):
        refine(scorer, base, {}, SearchSettings(storage="study.log"))


def test_what_is_pinned_or_cannot_act_is_no_variable(toys):
    scorer, base = piped(toys)
    free = PlanChoices(scorer, base)
    names = {name for options in free.knobs for name, _ in options[0]}
    assert "recompute" in names and "bucket_bytes" not in names
    pinned = PlanChoices(scorer, base, {"recompute": "none"})
    assert "recompute" not in {name for options in pinned.knobs for name, _ in options[0]}
    assert free.choice(free.start) == base
    assert free.sizes[-1] == 7


def test_cuts_that_cross_and_plans_that_do_not_fit_are_missing_memory(toys):
    scorer, base = piped(toys)
    choices = PlanChoices(scorer, base, {"recompute": "none", "blocks_per_group": 1})
    before_the_first = [0] * (len(choices.sizes) - 1) + [0]
    assert choices.choice(before_the_first) is None
    scores = choices.scores(np.array([before_the_first, choices.start]))
    assert scores.excess_bytes.tolist() == [choices.capacity_bytes, 0]
    assert scores.time_ns.tolist() == 2 * [scorer.step_time_ns(*base)]


def test_buckets_are_chosen_where_replicas_reduce_them(toys):
    scorer = Scorer(toys.problem(toys.graph(layers=3), toys.cluster(devices=2)))
    base = (Candidate(dp_replicate=2), ((0, 5),))
    names = {name for options in PlanChoices(scorer, base).knobs for name, _ in options[0]}
    assert "bucket_bytes" in names
    refined = refine(scorer, base, {}, SearchSettings("auto"))
    assert scorer.step_time_ns(*refined.choice) <= scorer.step_time_ns(*base)


def test_choices_of_blocks_are_told_and_said_not_to_run(toys):
    cluster = toys.cluster(nodes=2, devices=2)
    scorer = Scorer(toys.problem(toys.graph(layers=5), cluster))
    base = (Candidate(dp_shard=4), ((0, 7),))
    (sentence,) = layer_gain(scorer, base, SearchSettings("auto"))
    assert "chosen block by block" in sentence and "not run" in sentence
    other = (replace(base[0], zero=2), base[1])
    assert layer_gain(scorer, other, SearchSettings("auto")) == ()
    (unused,) = layer_gain(scorer, other, SearchSettings("rl", policy=Path("policy.json")))
    assert unused.startswith("--policy was not used")


def test_a_policy_trained_on_blocks_is_used_for_blocks(toys, tmp_path):
    scorer = Scorer(toys.problem(toys.graph(layers=5), toys.cluster(nodes=2, devices=2)))
    base = (Candidate(dp_shard=4), ((0, 7),))
    path = tmp_path / "policy.json"
    save_policy(pretrain([layer_choices(scorer, base[0])], 3, 0), path)
    refined = refine(scorer, base, {}, SearchSettings("rl", policy=path))
    assert "chosen block by block" in refined.sentences[-1]
    with pytest.raises(PlanError, match="read by --search rl"):
        refine(scorer, base, {}, SearchSettings("tpe", policy=path))
