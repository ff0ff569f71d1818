"""What most people train with: plain FSDP and DDP over all devices, beside every plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from claw_plan.planner.candidate import BUCKET_BYTES
from claw_plan.planner.errors import PlanError
from claw_plan.planner.explain import infeasible_message
from claw_plan.planner.score import Scorer
from claw_plan.planner.search_space import Choice, search_space
from claw_plan.planner.space import Space


def plain_baselines(scorer: Scorer, fix: Mapping[str, Any]) -> dict[str, Choice | str]:
    """Plain FSDP and DDP over all devices, each at its best microbatch and recompute.

    DDP as it comes: its own buckets, averaged by the library.
    """
    devices = scorer.problem.cluster.num_devices
    free = {knob: fix[knob] for knob in ("microbatch_size", "recompute") if knob in fix}
    usual = {"bucket_bytes": BUCKET_BYTES, "collective": "auto"}
    plain: dict[str, dict[str, Any]] = {
        "FSDP": {"pp": 1, "tp": 1, "dp_replicate": 1, "dp_shard": devices},
        "DDP": {"pp": 1, "tp": 1, "dp_shard": 1, "dp_replicate": devices, **usual},
    }
    return {name: _baseline(scorer, {**knobs, **free}) for name, knobs in plain.items()}


def _baseline(scorer: Scorer, fix: Mapping[str, Any]) -> Choice | str:
    """The best that has these knobs, or why there is none."""
    try:
        space = Space(scorer.problem, fix)
    except PlanError as error:
        return str(error)
    found = search_space(scorer, space, counts_knobs=False)
    if found.ranked:
        return found.ranked[0]
    return infeasible_message(scorer, found) if found.report.space else space.explain_empty()


def agrees(choice: Choice | str, fix: Mapping[str, Any]) -> TypeGuard[Choice]:
    """Whether a baseline is a candidate of the space under these pins."""
    return not isinstance(choice, str) and all(
        getattr(choice[0], knob) == value for knob, value in fix.items()
    )
