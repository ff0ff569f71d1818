"""Policies learn, are kept as files, and help on a problem they have not seen."""

from __future__ import annotations

from math import log

import pytest
import torch

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.choices import Evaluations
from claw_plan.planner.errors import PlanError
from claw_plan.planner.per_layer_costs import layer_choices
from claw_plan.planner.policy_search import (
    KNOWN_LOGIT,
    load_policy,
    new_policy,
    policy_searcher,
    pretrain,
    save_policy,
)
from claw_plan.planner.score import Scorer


def make_choices(toys, layers, memory_bytes=1 << 40):
    cluster = toys.cluster(nodes=2, devices=2, memory_bytes=memory_bytes)
    scorer = Scorer(toys.problem(toys.graph(layers=layers, hidden=300), cluster))
    return layer_choices(scorer, Candidate(dp_shard=4))


def found_by(choices, policy_file, budget=60):
    evaluations = Evaluations(choices, budget)
    evaluations.ask([choices.start])
    policy_searcher(policy_file)(evaluations, 0)
    return evaluations.best.time_ns


def test_a_trained_policy_finds_more_in_a_problem_it_has_not_seen(toys, tmp_path):
    seen, unseen = [make_choices(toys, layers) for layers in (8, 12)], make_choices(toys, 20)
    save_policy(pretrain(seen, 40, 0), tmp_path / "policy.json")
    save_policy(new_policy(unseen.features.shape[2], 0), tmp_path / "new.json")
    trained = found_by(unseen, tmp_path / "policy.json")
    assert trained < found_by(unseen, tmp_path / "new.json")


def test_a_file_gives_the_same_policy_back(tmp_path):
    policy = new_policy(4, 3)
    save_policy(policy, tmp_path / "policy.json")
    features = torch.rand(5, 3, 4)
    assert torch.equal(policy(features), load_policy(tmp_path / "policy.json")(features))


def test_the_known_option_is_drawn_as_often_as_is_said():
    # exp(3) against eight others: 0.715; the docstring's 0.71.
    share = torch.softmax(torch.tensor([KNOWN_LOGIT] + [0.0] * 8), 0)[0]
    assert share == pytest.approx(1 / (1 + 8 * 2.718281828**-3), abs=1e-6)
    assert KNOWN_LOGIT == pytest.approx(log(8 * 0.715 / 0.285), abs=0.02)


@pytest.mark.parametrize(
    "text, why",
    [
        ("{}", "holds no policy"),
        ("no json", "holds no policy"),
        ('{"num_features": 2, "state": {"x": [1.0]}}', "holds no policy"),
        (None, "cannot read"),
    ],
)
def test_what_is_no_policy_is_refused(tmp_path, text, why):
    path = tmp_path / "policy.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PlanError, match=why):
        load_policy(path)


def test_a_policy_of_other_features_is_refused(toys, tmp_path):
    path = tmp_path / "policy.json"
    save_policy(new_policy(2, 0), path)
    with pytest.raises(PlanError, match="reads 2 features"):
        found_by(make_choices(toys, 4), path, budget=10)
