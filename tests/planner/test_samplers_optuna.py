"""Studies are kept in a file or a database, and resumed from it."""

from __future__ import annotations

import optuna
import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.errors import PlanError
from claw_plan.planner.per_layer_costs import layer_choices
from claw_plan.planner.samplers import OPTUNA, search_choices
from claw_plan.planner.score import Scorer


@pytest.fixture(scope="module")
def choices(toys):
    """Twelve blocks whose activations fit in part."""
    cluster = toys.cluster(nodes=2, devices=2, memory_bytes=30_000, kind="cpu")
    scorer = Scorer(toys.problem(toys.graph(layers=12, hidden=300), cluster))
    return layer_choices(scorer, Candidate(dp_shard=4))


@pytest.mark.parametrize("name", OPTUNA)
@pytest.mark.parametrize("kind", ["journal", "sqlite"])
def test_a_study_goes_on_where_it_ended(choices, tmp_path, name, kind):
    where = str(tmp_path / "study.log")
    if kind == "sqlite":
        where = f"sqlite:///{tmp_path / 'study.db'}"
    first = search_choices(choices, name, budget=12, storage=where)
    second = search_choices(choices, name, budget=12, storage=where)
    assert (second.excess_bytes, second.time_ns) <= (first.excess_bytes, first.time_ns)
    (title,) = optuna.get_all_study_names(storage=_open(where))
    study = optuna.load_study(study_name=title, storage=_open(where))
    # Of 12 evaluations the start is none of the study's; the second asks its best again, too.
    assert len(study.trials) == 11 + 10
    assert title.startswith(name)
    drawn = [tuple(trial.params.values()) for trial in study.trials]
    assert len(set(drawn[1:])) > 11, "a resumed study draws new assignments"


def _open(where):
    if "://" in where:
        return where
    return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(where))


def test_the_first_trial_is_the_best_known(choices, tmp_path):
    where = str(tmp_path / "study.log")
    known = (1,) * 12
    search_choices(choices, "tpe", budget=4, storage=where, known=[known])
    (title,) = optuna.get_all_study_names(storage=_open(where))
    trials = optuna.load_study(study_name=title, storage=_open(where)).trials
    assert tuple(trials[0].params.values()) in (known, choices.start)
    assert len(trials) == 2


def test_a_storage_that_cannot_be_is_refused(choices, tmp_path):
    with pytest.raises(PlanError, match="there is no folder"):
        search_choices(choices, "tpe", budget=5, storage=str(tmp_path / "no" / "study.log"))
    with pytest.raises(PlanError, match="give a file, or a database"):
        search_choices(choices, "tpe", budget=5, storage="nosuch://x")
