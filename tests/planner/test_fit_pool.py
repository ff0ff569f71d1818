from __future__ import annotations

import pytest

from claw_plan.planner.fit_pool import NOTHING, FitPool
from claw_plan.planner.trainer_fit import Costs, constants_of, simulate_row
from claw_plan.profiles.hardware_text import hardware_of
from claw_plan.profiles.trainers import load_trainers
from claw_plan.profiles.training_row import Dimensions, PublishedPlan, TrainingRow


def row(name: str, **plan: object) -> TrainingRow:
    degrees = {"dp": 8, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "etp": 1, "vpp": 1}
    settings = {"micro_batch": 1, "global_batch": 8, "sharding": "zero3", **degrees, **plan}
    return TrainingRow(
        id=name,
        family="made up",
        group=name,
        trainer="torchtitan",
        trust="A",
        complete=True,
        model_name="tiny",
        dimensions=Dimensions(
            layers=2, hidden=256, heads=4, kv_heads=4, head_dim=64, ffn=1024, vocab=512,
            seq_len=128,
        ),
        cluster=hardware_of("A100-80GB", 8, 8).cluster,
        device_name="a100-sxm-80gb",
        plan=PublishedPlan(**settings),  # type: ignore[arg-type]
        step_time_ns=1_000_000,
    )  # fmt: skip


@pytest.mark.slow
def test_processes_answer_as_this_one_would() -> None:
    rows = [row("plain"), row("tensor", dp=4, tp=2), row("impossible", dp=64, global_batch=64)]
    trainers = load_trainers()
    values = constants_of(trainers, rows)
    slower = values | {("rate", "a100-sxm-80gb", "half"): 1e13}
    with FitPool(rows, trainers) as pool:
        same = pool.simulate([values])
        each = pool.simulate([slower, values, values])
    expected = [simulate_row(one, trainers["torchtitan"], Costs(values)) for one in rows[:2]]
    assert same[:2] == expected
    assert same[2] == NOTHING
    assert each[1] == expected[1]
    assert each[0].error > expected[0].error
