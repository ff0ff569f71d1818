from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from claw_plan.executor import learn as module
from claw_plan.executor.learn import learn
from claw_plan.executor.run_files import MEASUREMENTS, PLAN, RESULT, RunResult
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.plan import (
    Plan,
    PlanMesh,
    PlanModel,
    PlanSchedule,
    PlanStage,
    PlanTraining,
    candidate_mapping,
    save_plan,
)
from claw_plan.profiles.errors import InputError
from claw_plan.profiles.measurement import Measurement
from claw_plan.profiles.profile import Profile, append_profile, load_profile
from claw_plan.profiles.units import NS_PER_MS
from claw_plan.profiles.work import OpWork

WORK = OpWork(kind="gemm", dims=(1, 8, 8, 8), dtype="float32", flops=1024, bytes=768)
COMPUTE_MS = {1: 100, 2: 200, 4: 400}
KERNELS = {1: 8000, 2: 4000, 4: 2000}
OTHER_MS = 20
"""A predicted step is compute and kernels, which the constants correct, and waiting."""


def finished_run(folder: Path, microbatch_size: int, measured_ms: float, cluster: str) -> Path:
    folder.mkdir()
    plan = Plan(
        version=1,
        model=PlanModel(file="m.py", sha256="0" * 64, parameters=8),
        training=PlanTraining(
            global_batch=8, seq_len=None, precision="float32", optimizer="adamw"
        ),
        cluster={
            "name": cluster,
            "nodes": [{"count": 1, "devices": {"type": "cpu", "cores": 2, "count": 4}}],
        },
        candidate=candidate_mapping(Candidate(microbatch_size=microbatch_size)),
        mesh=PlanMesh(axes={}, devices=["0:0"]),
        schedule=PlanSchedule(name="1F1B", stages_per_rank=1, num_microbatches=8),
        blocks=[],
        stages=[PlanStage(rank_group=0, modules=["a"])],
    )
    save_plan(plan, folder / PLAN)
    result = RunResult(
        losses=[1.0],
        step_time_ms={"median": measured_ms, "min": measured_ms, "max": measured_ms},
        process_time_ms=1.0,
        samples_per_s=1.0,
        tokens_per_s=None,
        predicted_step_time_ms=None,
        peak_memory_bytes=[1],
        predicted_memory_gib=None,
        parts_ms={},
        data="",
        run=str(folder),
    )
    (folder / RESULT).write_text(json.dumps(dataclasses.asdict(result)))
    measured = Measurement(device="cpu-core", work=WORK, samples_ns=(microbatch_size,))
    append_profile(folder / MEASUREMENTS, [measured])
    return folder


@pytest.fixture(autouse=True)
def planner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Predicts `op_scale * compute + op_overhead * kernels + other + step_overhead`."""

    def predicted(size: int, profile: Profile) -> Any:
        def constant(name: str, default: float) -> float:
            return profile.constant("cpu-core", name, default)

        compute = COMPUTE_MS[size] * NS_PER_MS * constant("op_scale", 1.0)
        host = KERNELS[size] * constant("op_overhead_ns", 0.0)
        fixed = OTHER_MS * NS_PER_MS + constant("step_overhead_ns", NS_PER_MS)
        return SimpleNamespace(step_time_ns=round(compute + host + fixed))

    def simulate_under(path: Path, profiles: Sequence[Profile]) -> list[Any]:
        size = module.load_plan(path).knobs().microbatch_size
        return [predicted(size, profile) for profile in profiles]

    monkeypatch.setattr(module, "simulate_under", simulate_under)
    monkeypatch.chdir(tmp_path)


def test_constants_are_found_and_later_predictions_are_right(tmp_path: Path) -> None:
    # Measured: compute takes 1.5 times as long as predicted, and a step 5 ms beside it.
    runs = [
        finished_run(tmp_path / str(size), size, 1.5 * compute + OTHER_MS + 5, "cpu")
        for size, compute in COMPUTE_MS.items()
    ]
    learned = learn(runs)
    assert learned.profile == Path("cpu.profile")
    assert learned.median_error(after=False) == pytest.approx(1 - 221 / 325, abs=1e-3)
    assert learned.median_error(after=True) < 0.02
    constants = load_profile(learned.profile).constants["cpu-core"]
    assert constants["op_scale"] == pytest.approx(1.5, rel=0.05)


def test_host_time_of_kernels_is_told_from_their_own(tmp_path: Path) -> None:
    # Measured: 10 us beside each kernel, which small microbatches have more of.
    runs = [
        finished_run(tmp_path / str(size), size, compute + KERNELS[size] / 100 + OTHER_MS, "cpu")
        for size, compute in COMPUTE_MS.items()
    ]
    learned = learn(runs)
    assert learned.median_error(after=True) < 0.02
    constants = load_profile(learned.profile).constants["cpu-core"]
    assert constants["op_overhead_ns"] == pytest.approx(10_000, rel=0.2)
    assert constants["op_scale"] == pytest.approx(1.0, rel=0.05)


def test_steps_that_are_not_the_plans_teach_no_constants(tmp_path: Path) -> None:
    """As of test_constants_are_found_and_later_predictions_are_right, and one within a warm-up."""
    runs = [
        finished_run(tmp_path / str(size), size, 1.5 * compute + OTHER_MS + 5, "cpu")
        for size, compute in COMPUTE_MS.items()
    ]
    warm = finished_run(tmp_path / "warm", 2, 5000.0, "cpu")
    told = json.loads((warm / RESULT).read_text()) | {"unlike_plan": "a warm-up"}
    (warm / RESULT).write_text(json.dumps(told))
    learned = learn([*runs, warm])
    assert learned.median_error(after=True) < 0.02
    assert load_profile(learned.profile).constants["cpu-core"]["op_scale"] == pytest.approx(
        1.5, rel=0.05
    )
    assert [run.unlike_plan for run in learned.runs] == [""] * len(runs) + ["a warm-up"]
    alone = learn([warm], tmp_path / "alone.profile")
    assert alone.median_error(after=True) is None


def test_measurements_are_merged_once(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "a", 1, 120.0, "cpu")
    assert learn([run]).measurements == 1
    assert learn([run]).measurements == 0
    assert len(load_profile(Path("cpu.profile")).measurements) == 1


def test_unfinished_runs_are_left_out_and_named(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "a", 1, 120.0, "cpu")
    (tmp_path / "b").mkdir()
    learned = learn([run, tmp_path / "b"])
    assert [r.run for r in learned.runs] == [str(run)]
    assert learned.skipped == (str(tmp_path / "b"),)


def test_without_a_finished_run_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    with pytest.raises(InputError, match=r"no finished run in .*b"):
        learn([tmp_path / "b"])
    assert not list(tmp_path.glob("*.profile"))


def test_runs_of_two_clusters_need_a_name(tmp_path: Path) -> None:
    runs = [
        finished_run(tmp_path / "a", 1, 120.0, "one"),
        finished_run(tmp_path / "b", 1, 120.0, "two"),
    ]
    with pytest.raises(InputError, match=r"one\.profile, two\.profile"):
        learn(runs)
    assert learn(runs, tmp_path / "both.profile").profile == tmp_path / "both.profile"
