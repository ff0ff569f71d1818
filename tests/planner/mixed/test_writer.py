"""Plans on unlike devices, written and read back."""

from __future__ import annotations

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.errors import PlanError
from claw_plan.planner.mixed.plan import MixedCandidate, MixedRank, Pipeline, pipeline_on
from claw_plan.planner.mixed.writer import mixed_of_plan, write_mixed_plan
from claw_plan.planner.model_source import load_model
from claw_plan.planner.plan import load_plan, save_plan
from claw_plan.planner.plan_check import check_plan


@pytest.fixture
def written(toys, mixed_toys, tmp_path):
    """Two pipelines: one over both kinds, one on the second node of the fast kind."""
    file = tmp_path / "model.py"
    file.write_text("from torch import nn\n\ndef build_model():\n    return nn.Linear(2, 2)\n")
    kinds = [mixed_toys.ToyKind(), mixed_toys.ToyKind(nodes=2, flops_per_s=2e6)]
    scorer = mixed_toys.mixed_scorer(toys, kinds, global_batch=8)
    over = Pipeline(
        batch=4,
        ranks=(
            MixedRank(kind=0, place=0, candidate=Candidate(pp=2, tp=2, microbatch_size=2)),
            MixedRank(kind=1, place=0, candidate=Candidate(pp=2, dp_shard=2)),
        ),
        cuts=((0, 3), (3, 6)),
    )
    mixed = MixedCandidate(pipelines=(over, pipeline_on(1, Candidate(), ((0, 6),), 4)))
    plan = write_mixed_plan(
        scorer.problem,
        scorer.score(mixed),
        load_model(file, build="nn.Linear(2, 2)", inputs="x=float32[B,2]"),
        folder=tmp_path,
        profile="toys",
        search={},
    )
    return scorer.problem, mixed, plan


def test_a_plan_names_every_device_and_reads_back(written, tmp_path):
    problem, mixed, plan = written
    assert [rank.devices for rank in plan.mixed[0].ranks] == [["0:0", "0:1"], ["1:0", "1:1"]]
    assert plan.mesh.devices == ["0:0", "0:1", "1:0", "1:1", "1:0"]
    assert plan.training.global_batch == 8 and plan.mixed[0].num_microbatches == 2
    save_plan(plan, tmp_path / "plan.yaml")
    assert mixed_of_plan(load_plan(tmp_path / "plan.yaml"), problem) == mixed


def test_the_executor_refuses_it_in_one_line(written):
    with pytest.raises(
        PlanError, match=r"unlike devices \(k0, k1\), which is simulated but not executed yet"
    ):
        check_plan(written[2], "plan.yaml")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kind": "k7"}, "no kind 'k7'"),
        ({"devices": ["0:1", "1:0"]}, "neighbouring devices"),
        ({"devices": ["9:1"]}, "neighbouring devices"),
    ],
)
def test_a_rank_lies_on_neighbours_of_one_kind(written, change, message):
    problem, _, plan = written
    rank = plan.mixed[0].ranks[0].model_copy(update=change)
    line = plan.mixed[0].model_copy(update={"ranks": [rank, plan.mixed[0].ranks[1]]})
    edited = plan.model_copy(update={"mixed": [line, plan.mixed[1]]})
    with pytest.raises(PlanError, match=message):
        mixed_of_plan(edited, problem)


def test_the_pipelines_take_the_whole_batch(written):
    problem, _, plan = written
    with pytest.raises(PlanError, match="take 4 samples together, but"):
        mixed_of_plan(plan.model_copy(update={"mixed": plan.mixed[1:]}), problem)
