"""One small, hand-made planning result for the tests of what people and scripts see."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.memory import StageMemory
from claw_plan.planner.plan import (
    Plan,
    PlanMesh,
    PlanModel,
    PlanSchedule,
    PlanStage,
    PlanTraining,
    candidate_mapping,
)
from claw_plan.planner.score import Scored
from claw_plan.planner.search import CutReport, SearchReport
from claw_plan.profiles.units import GIB, NS_PER_MS
from claw_plan.simulator.timeline import SIMULATED, Span, Timeline

BEST = Candidate(pp=2, dp_shard=4, microbatch_size=4)
PARTS_MS = {
    "compute": 30,
    "recompute": 0,
    "tp_comm_exposed": 0,
    "dp_comm_exposed": 4,
    "pp_bubble": 3,
    "optimizer": 2,
    "overhead": 1,
}


def scored(candidate: Candidate, step_ms: int, peaks_gib: Mapping[int, int]) -> Scored:
    return Scored(
        candidate=candidate,
        cuts=tuple((stage, stage + 1) for stage in peaks_gib),
        step_time_ns=step_ms * NS_PER_MS,
        memory=tuple(
            StageMemory(
                stage=stage,
                peak_bytes=peak * GIB,
                capacity_bytes=80 * GIB,
                device_bytes=89 * GIB,
                parts={"parameters": GIB, "activations": (peak - 1) * GIB, "buffers": 0},
            )
            for stage, peak in peaks_gib.items()
        ),
        parts_ns={name: part * NS_PER_MS for name, part in PARTS_MS.items()},
        samples_per_s=64 / (step_ms / 1000),
        tokens_per_s=64 * 1024 / (step_ms / 1000),
        mfu=0.5,
        compute_utilisation=0.75,
        communication_share=0.1,
        sources={"measured": 0.25, "analytic": 0.75},
        timeline=Timeline(
            origin=SIMULATED,
            spans=(
                Span(rank=0, stream="compute", kind="forward", name="h.0", start_ns=0, end_ns=9),
            ),
        ),
    )


def plan() -> Plan:
    return Plan(
        version=1,
        model=PlanModel(file="gpt.py", sha256="0" * 64, parameters=124475904),
        training=PlanTraining(
            global_batch=64, seq_len=1024, precision="bfloat16", optimizer="adamw"
        ),
        cluster={"name": "one-node"},
        candidate=candidate_mapping(BEST),
        mesh=PlanMesh(axes={"pp": 2, "dp_shard": 4}, devices=[f"0:{i}" for i in range(8)]),
        schedule=PlanSchedule(name="1F1B", stages_per_rank=1, num_microbatches=4),
        blocks=["h.0", "h.1"],
        stages=[
            PlanStage(rank_group=0, modules=["wte", "h.0"]),
            PlanStage(rank_group=1, modules=["h.1", "lm_head"]),
        ],
    )


@pytest.fixture
def result() -> Any:
    """A plan for eight devices in two stages, one runner-up, one baseline, one that fails."""
    best = scored(BEST, 40, {0: 20, 1: 76})
    device = SimpleNamespace(name="A100-SXM4-80GB")
    node = SimpleNamespace(type="dgx-a100-80gb", device=device, device_count=8)
    return SimpleNamespace(
        plan=plan(),
        best=best,
        alternatives=(scored(Candidate(dp_shard=8, microbatch_size=4), 42, {0: 30}),),
        baselines={
            "plain FSDP": scored(Candidate(dp_shard=8), 60, {0: 30}),
            "DDP": "needs 12.0 GiB more than the 72.0 GiB of stage 0",
        },
        search=SearchReport(
            space=48230,
            space_per_knob={"pp": 4, "tp": 3},
            bound_pruned=47911,
            memory_pruned=201,
            simulated=118,
            seconds=3.25,
            gap=0.0,
            cuts=CutReport(groups=3, cuts=7, simulated=2, groups_left=1, gap=0.125),
        ),
        graph=SimpleNamespace(name="GPT", num_parameters=124475904, seq_len=1024),
        cluster=SimpleNamespace(name="one-node", nodes=(node,)),
        assumptions=("one non-blocking switch joins the nodes",),
        reasons=("tp: its all-reduces would cost 9.0 ms a step",),
        given=None,
        objective="step_time",
        front=(),
    )
