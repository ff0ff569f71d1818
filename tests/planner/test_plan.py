"""plan.yaml: written, read back, and refused with the place of what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.errors import PlanError
from claw_plan.planner.plan import candidate_from, candidate_mapping, load_plan, plan_text
from claw_plan.planner.plan_writer import write_plan
from claw_plan.planner.score import Scorer
from claw_plan.profiles.errors import InputError


class ToyModel:
    path, sha256, build_text, inputs_text = Path("toy.py"), "00", None, None


@pytest.fixture
def plan(toys):
    problem = toys.problem(toys.graph(layers=4))
    scorer, candidate = Scorer(problem), Candidate(pp=2, tp=2)
    scored = scorer.score(candidate, scorer.bounds.stage_path(candidate).cuts)
    return write_plan(
        problem, scored, ToyModel(), folder=Path(), profile="catalogue", search={"gap": 0.0}
    )


def test_stages_ties_rules_and_devices(plan):
    assert [stage.modules for stage in plan.stages] == [
        ["embedding", "blocks[0:3]"],
        ["blocks.3", "head"],
    ]
    assert plan.tied[0].model_dump() == {
        "parameters": ["embedding", "head"], "stages": [0, 1], "reduce": "sum",
    }  # fmt: skip
    assert [(rule.modules, rule.style) for rule in plan.tensor_parallel] == [
        ("blocks[*].up", "colwise"),
        ("blocks[*].down", "rowwise"),
    ]
    assert plan.mesh.devices == ["0:0", "0:1", "0:2", "0:3"]
    assert plan.schedule.num_microbatches == 8
    assert {(use.axis, use.op) for use in plan.communication} == {
        ("tp", "all_reduce"), ("pp", "send"),
    }  # fmt: skip


def test_written_and_read_back(plan, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(plan_text(plan))
    assert load_plan(path) == plan
    assert load_plan(path).knobs() == Candidate(pp=2, tp=2)


def test_every_knob_of_a_candidate_is_written():
    candidate = Candidate(dp_replicate=4, buckets=(3, 1))
    assert candidate_from(candidate_mapping(candidate)) == candidate


@pytest.mark.parametrize(
    "path_of_key, value, said",
    [
        (("training", "global_batch"), 0, "training.global_batch"),
        (("training", "optimiser"), "adamw", "training.optimiser"),
        (("stages",), 3, "stages"),
        (("version",), 2, "version"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(plan, tmp_path, path_of_key, value, said):
    data = yaml.safe_load(plan_text(plan))
    inner = data
    for key in path_of_key[:-1]:
        inner = inner[key]
    inner[path_of_key[-1]] = value
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(InputError) as caught:
        load_plan(path)
    assert "plan.yaml:" in str(caught.value) and said in str(caught.value)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"tpp": 2}, "candidate.tpp: no such knob; did you mean 'tp'"),
        ({"tp": "2"}, "candidate.tp is of type int, but got '2'"),
        ({"sequence_parallel": 1}, "candidate.sequence_parallel is of type bool, but got 1"),
        ({"pp": 0}, "pp is at least 1"),
        ({"mesh_order": ["pp", "tp"]}, "mesh_order names"),
        ({"buckets": [3, "1"]}, "candidate.buckets are numbers of parameters, but got [3, '1']"),
        ({"buckets": [3, 0]}, "at least 1 parameter each"),
    ],
)
def test_knobs_that_cannot_be(plan, change, said):
    edited = plan.model_copy(update={"candidate": {**plan.candidate, **change}})
    with pytest.raises(PlanError) as caught:
        edited.knobs()
    assert said in str(caught.value)
