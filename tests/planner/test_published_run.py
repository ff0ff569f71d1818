"""Published plans as candidates, and which layers lie on which stage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from claw_plan.planner.errors import PlanError
from claw_plan.planner.published_run import layers_per_stage, pose, with_settings
from claw_plan.planner.schedules import INTERLEAVED
from claw_plan.profiles.hardware_text import hardware_of
from claw_plan.profiles.trainer import NEUTRAL, Trainer
from claw_plan.profiles.training_row import Dimensions, PublishedPlan, TrainingRow

DIMS = Dimensions(
    layers=8, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=256, vocab=512, seq_len=32
)
PLAN = PublishedPlan(
    dp=4, tp=2, pp=2, cp=1, ep=1, etp=1, vpp=1, micro_batch=2, global_batch=64, sharding="zero1"
)


def row(**plan: object) -> TrainingRow:
    hardware = hardware_of("A100-80GB", 16, 8)
    return TrainingRow(
        id="run", family="f", group="g", trainer="torch", trust="A", complete=True,
        model_name="tiny", dimensions=DIMS, cluster=hardware.cluster,
        device_name=hardware.device_name, plan=replace(PLAN, **plan), step_time_ns=10**9,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (96, 8, (12,) * 8),  # GPT-3
        (126, 16, (7, *(8,) * 14, 7)),  # Llama 3 405B, arXiv 2407.21783, section 3.3.2
        (78, 12, (7,) * 6 + (6,) * 6),
        (5, 2, (3, 2)),
        (3, 5, (1, 1, 1, 0, 0)),
        (7, 1, (7,)),
    ],
)
def test_layers_lie_evenly_on_stages(layers, stages, expected):
    assert sum(expected) == layers
    assert layers_per_stage(layers, stages) == expected


def test_stages_are_runs_of_units_with_the_ends_at_the_ends():
    assert pose(row(), NEUTRAL).cuts == ((0, 5), (5, 10))
    assert pose(row(vpp=2), NEUTRAL).cuts == ((0, 3), (3, 5), (5, 7), (7, 10))
    assert pose(row(layers_per_stage=(3, 5)), NEUTRAL).cuts == ((0, 4), (4, 10))


def test_knobs_follow_the_plan():
    candidate = pose(row(sequence_parallel=True, recompute="attention"), NEUTRAL).candidate
    assert (candidate.dp_replicate, candidate.dp_shard, candidate.zero) == (1, 4, 1)
    assert (candidate.schedule, candidate.stages_per_rank) == ("1F1B", 1)
    assert candidate.sequence_parallel and candidate.recompute == "attention"
    assert candidate.num_microbatches(64) == 8
    assert pose(row(vpp=2), NEUTRAL).candidate.schedule == INTERLEAVED


@pytest.mark.parametrize(
    ("sharding", "group", "replicate", "shard", "zero"),
    [
        ("none", 0, 4, 1, 2),
        ("zero1", 2, 2, 2, 1),
        ("zero2", 0, 1, 4, 2),
        ("zero3", 8, 1, 4, 2),
    ],
)
def test_states_are_sharded_over_the_printed_group(sharding, group, replicate, shard, zero):
    candidate = pose(row(sharding=sharding, shard_group=group), NEUTRAL).candidate
    found = (candidate.dp_replicate, candidate.dp_shard, candidate.zero)
    assert found == (replicate, shard, zero)


def test_gathered_parameters_stay_under_a_pipeline():
    assert pose(row(sharding="zero3"), NEUTRAL).candidate.zero == 2
    alone = row(sharding="zero3", pp=1, dp=8)
    assert pose(alone, NEUTRAL).candidate.zero == 3


def test_linear_layers_of_lower_precision():
    graph = pose(row(linear_dtype="float8"), NEUTRAL).problem.graph
    dtypes = {op.dtype for op in graph.cost(1).forward if getattr(op, "kind", "") == "gemm"}
    assert dtypes == {"float8"}


def test_what_cannot_be_expressed_says_why():
    with pytest.raises(PlanError, match="uses 32 devices, the cluster has 16"):
        pose(row(dp=8), NEUTRAL)
    with pytest.raises(PlanError, match=r"8 layers do not lie on 2 x 1 stages as \(3, 4\)"):
        pose(row(layers_per_stage=(3, 4)), NEUTRAL)


def test_settings_act_on_the_constants_they_touch():
    trainer = Trainer(name="t", memory_scale=2.0, tp_scale=4.0, host_ns=8000.0)
    plain = with_settings(trainer, PLAN)
    assert plain == trainer
    compiled = with_settings(trainer, replace(PLAN, compiled=True))
    assert compiled.memory_scale < 2.0 and compiled.host_ns < 8000.0 and compiled.tp_scale == 4.0
    graphs = with_settings(trainer, replace(PLAN, cuda_graphs=True))
    assert graphs.host_ns < 8000.0 and graphs.memory_scale == 2.0
    assert with_settings(trainer, replace(PLAN, async_tp=True)).tp_scale < 4.0
