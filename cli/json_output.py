"""Results as JSON: the script interface. docs/json.md describes every key and formula.

The keys are stable: they may be joined by others, but not renamed or given another meaning. When
no plan fits, the same keys stand with null values, and `reason` says why.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from claw_plan.profiles.units import gib, ms_from_ns

if TYPE_CHECKING:
    from claw_plan.executor.run_files import RunResult
    from claw_plan.executor.verify import VerifyResult
    from claw_plan.planner.baseline import Baseline
    from claw_plan.planner.memory import StageMemory
    from claw_plan.planner.planning import PlanningResult
    from claw_plan.planner.score import Scored
    from claw_plan.planner.search import SearchReport

PLAN_KEYS = (
    "plan",
    "step_time_ms",
    "samples_per_s",
    "tokens_per_s",
    "mfu",
    "memory",
    "parts_ms",
    "search",
    "baselines",
    "alternatives",
    "assumptions",
)


def json_text(value: Mapping[str, Any]) -> str:
    """One JSON object with a line break at its end; infinite and undefined numbers are null."""
    return json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value


def plan_object(result: PlanningResult) -> dict[str, Any]:
    """What `claw-plan MODEL --json` prints."""
    return {
        "plan": result.plan.model_dump(mode="json"),
        **score_object(result.best),
        "search": search_object(result.search),
        "baselines": {
            name: {"reason": baseline} if isinstance(baseline, str) else split_object(baseline)
            for name, baseline in result.baselines.items()
        }
        | ({result.given.name: baseline_object(result.given)} if result.given else {}),
        "alternatives": [split_object(scored) for scored in result.alternatives],
        "assumptions": list(result.assumptions),
    }


def baseline_object(given: Baseline) -> dict[str, Any]:
    """The user's own setting: whether it fits, and where not, by how much; what was left out."""
    value: dict[str, Any] = {"fits": not given.verdict, "notes": list(given.notes)}
    if given.scored is None:
        return {"fits": None, "reason": given.refused, "notes": list(given.notes)}
    if given.verdict:
        value["reason"] = given.verdict
    return value | split_object(given.scored)


def infeasible_object(reason: str, levers: Mapping[str, int] | None = None) -> dict[str, Any]:
    """What it prints when no plan fits: every key of `plan_object`, without a value."""
    missing = {change: gib(size) for change, size in (levers or {}).items()}
    return {**dict.fromkeys(PLAN_KEYS), "reason": " ".join(reason.split()), "levers": missing}


def score_object(scored: Scored) -> dict[str, Any]:
    """Speed, memory by stage and time by part of one way; also what `simulate --json` prints."""
    return {
        "step_time_ms": ms_from_ns(scored.step_time_ns),
        "samples_per_s": scored.samples_per_s,
        "tokens_per_s": scored.tokens_per_s,
        "mfu": scored.mfu,
        "memory": memory_objects(scored.memory),
        "parts_ms": {name: ms_from_ns(part) for name, part in scored.parts_ns.items()},
    }


def split_object(scored: Scored) -> dict[str, Any]:
    """`score_object` with the way itself, for alternatives and baselines."""
    candidate = dataclasses.asdict(scored.candidate)
    return {"candidate": candidate, **score_object(scored)}


def memory_objects(stages: Sequence[StageMemory]) -> list[dict[str, Any]]:
    """Peak, capacity and parts of a device of each pipeline stage, in GiB."""
    return [
        {
            "stage": stage.stage,
            "peak_gib": gib(stage.peak_bytes),
            "capacity_gib": gib(stage.capacity_bytes),
            "shown_gib": [gib(bound) for bound in stage.shown.interval_bytes],
            "out_of_memory_probability": stage.out_of_memory_probability,
            "parts": {name: gib(part) for name, part in stage.parts.items()},
        }
        for stage in stages
    ]


def search_object(search: SearchReport) -> dict[str, Any]:
    """Size of the space, what excluded how much of it, and how sure the answer is."""
    return {
        "space": search.space,
        "space_per_knob": dict(search.space_per_knob),
        "bound_pruned": search.bound_pruned,
        "memory_pruned": search.memory_pruned,
        "simulated": search.simulated,
        "seconds": search.seconds,
        "gap": search.gap,
        "optimal": search.optimal,
        "cuts": asdict(search.cuts) if search.cuts is not None else None,
    }


def run_object(result: RunResult) -> dict[str, Any]:
    """What `claw-plan run --json` prints."""
    return {
        "losses": list(result.losses),
        "step_time_ms": dict(result.step_time_ms),
        "predicted_step_time_ms": result.predicted_step_time_ms,
        "unlike_plan": result.unlike_plan or None,
        "peak_memory_bytes": list(result.peak_memory_bytes),
        "run": result.run,
        "checkpoint": result.checkpoint or None,
        "traffic": list(result.traffic),
        "traffic_differences": list(result.traffic_differences),
        "algorithms": dict(result.algorithms),
    }


def verification_object(result: VerifyResult) -> dict[str, Any]:
    """What `claw-plan verify --json` prints; `reason` stands when the plan failed."""
    value = {
        "ok": result.ok,
        "steps": result.steps,
        "fp64_max_loss_diff": result.fp64_max_loss_diff,
        "fp64_max_param_diff": result.fp64_max_param_diff,
        "fp32_max_loss_diff": result.fp32_max_loss_diff,
        "first_difference": result.first_difference or None,
        "blocks": result.blocks,
    }
    if not result.ok:
        value["reason"] = f"the plan does not train like one process: {result.first_difference}"
    return value
