"""trainers.yaml: complete, at most six constants each, and strict about what it is told."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest

from claw_plan.profiles import published_trainer
from claw_plan.profiles.errors import InputError
from claw_plan.profiles.fitted import Fitted
from claw_plan.profiles.trainer import CONSTANTS, SHARED
from claw_plan.profiles.trainers import DEFAULT, load_trainers, trainers_of

DOCUMENT = {
    "prior": dict.fromkeys((*CONSTANTS, *SHARED), 1.5),
    "own": {"fused": ["memory_scale", "dp_scale"], "unfused": ["memory_scale", "zero_rank_ns"]},
    "facts": {
        "torch": {},
        "child": {"like": "old", "gradient_bytes": 4},
        "old": {"own": "unfused", "gradient_bytes": 2, "fused_loss": False},
    },
}


def read(constants: Fitted | None = None, **facts):
    document = copy.deepcopy(DOCUMENT)
    document["facts"].update(facts)
    return trainers_of(document, "mine.yaml", constants or Fitted())


@pytest.mark.parametrize("with_fitted", [True, False])
def test_all_have_at_most_six_constants_of_their_own(with_fitted):
    trainers = load_trainers(with_fitted=with_fitted)
    assert DEFAULT in trainers and len(trainers) > 10
    for trainer in trainers.values():
        assert 0 < len(trainer.fitted) <= 6 and set(trainer.fitted) <= set(CONSTANTS)
        assert trainer.parent in trainers or trainer.name == DEFAULT
        assert all(getattr(trainer, key) >= 0 for key in (*CONSTANTS, *SHARED))


def test_what_is_the_same_for_all_is():
    trainers = load_trainers()
    for key in SHARED:
        assert len({getattr(trainer, key) for trainer in trainers.values()}) == 1


def test_every_trainer_that_rows_name_is_known():
    source = Path(published_trainer.__file__).read_text(encoding="utf-8")
    named = set(re.findall(r'return "([a-z0-9-]+)"', source))
    assert named and named <= set(load_trainers())


def test_a_trainer_takes_its_parents_facts_and_keeps_its_own():
    trainers = read()
    old, child = trainers["old"], trainers["child"]
    assert (old.gradient_bytes, old.fused_loss) == (2, False)
    assert (child.gradient_bytes, child.fused_loss) == (4, False)
    assert (old.parent, child.parent, trainers["torch"].parent) == ("torch", "old", "")
    assert child.fitted == old.fitted == ("memory_scale", "zero_rank_ns")
    assert trainers["torch"].fused_loss and trainers["torch"].memory_scale == 1.5


def test_fitted_constants_go_down_to_those_without():
    fit = Fitted(
        source="runs.yaml",
        trainers={"torch": {"dp_scale": 2.0}, "old": {"memory_scale": 0.7}},
        shared={"ep_scale": 0.9},
    )
    trainers = read(fit)
    assert [trainers[name].dp_scale for name in ("torch", "old", "child")] == [2.0] * 3
    assert [trainers[name].memory_scale for name in ("torch", "old", "child")] == [1.5, 0.7, 0.7]
    assert {trainer.ep_scale for trainer in trainers.values()} == {0.9}
    assert {trainer.source for trainer in trainers.values()} == {"runs.yaml"}


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"x": {"gradient_byts": 2}}, "x: there is no key 'gradient_byts'; did you mean"),
        ({"x": {"like": "olld"}}, "mine.yaml: x is like 'olld'; .*did you mean 'old'"),
        (
            {"x": {"own": "fussed"}},
            "mine.yaml: x: .* no constants 'fussed' .*did you mean 'fused'",
        ),
    ],
)
def test_what_is_not_known_is_refused_with_its_place(facts, said):
    with pytest.raises(InputError, match=said):
        read(**facts)


@pytest.mark.parametrize("key", ["facts", "prior", "own"])
def test_a_file_without_a_part_is_no_file_of_trainers(key):
    document = {name: part for name, part in DOCUMENT.items() if name != key}
    with pytest.raises(InputError, match=f"mine.yaml: .* mapping '{key}'"):
        trainers_of(document, "mine.yaml", Fitted())


def test_the_default_must_be_there():
    document = {**DOCUMENT, "facts": {"old": {}}}
    with pytest.raises(InputError, match=r"mine.yaml: 'torch' is missing"):
        trainers_of(document, "mine.yaml", Fitted())
