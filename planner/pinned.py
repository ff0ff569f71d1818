"""Knobs that the user pins with `--fix`: what they mean together, and why some cannot be had.

The first two checks need no model; `space.Space` asks the rest when it lays out the candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.errors import PlanError
from claw_plan.planner.members import BLOCKS_PER_GROUP
from claw_plan.planner.problem import WHOLE_PARAMETERS
from claw_plan.planner.schedules import EVERY_SCHEDULE, INTERLEAVED, schedule_refusal
from claw_plan.planner.supported import (
    averaging_refusal,
    can_grow_from,
    knob_refusal,
    nodes_refusal,
    refusal,
)
from claw_plan.profiles.cluster import Cluster

MOST_MICROBATCHES = 4096
"""A step of more is not offered: it is simulated task by task, and nobody accumulates so many."""

CANNOT_ACT = (
    "a schedule is chosen only where pp is above 1, and with one microbatch only one that splits "
    "backwards, which is offered together with recompute only where it is pinned, "
    "sequence_parallel only where tp is above 1 and divides the sequence, codec only where "
    "gradients are averaged, collective and codecs of momentum only where whole replicas meet "
    "during backward (fp32, dp_shard=1, pp=1; algorithms with tp=1, hierarchical with a codec "
    "between nodes of several replicas each), "
    "recompute_blocks only below the blocks of an even stage, reshard_ranks only as the most "
    "neighbours within a node, blocks_per_group only as "
    f"{', '.join(map(str, BLOCKS_PER_GROUP))} unless pinned, and a step has at most "
    f"{MOST_MICROBATCHES} microbatches"
)


def pinned_candidate(fix: Mapping[str, Any]) -> Candidate:
    """The pinned knobs, with a schedule that has the stages or stages that the schedule has.

    Where experts are shared, each is divided over tp.
    """
    chosen = dict(fix)
    if "stages_per_rank" not in fix and fix.get("schedule") in EVERY_SCHEDULE:
        chosen["stages_per_rank"] = EVERY_SCHEDULE[fix["schedule"]].fewest_stages
    elif fix.get("stages_per_rank", 1) > 1:
        chosen.setdefault("schedule", INTERLEAVED)
    if fix.get("ep", 1) > 1:
        chosen.setdefault("etp", fix.get("tp", 1))
    return Candidate(**chosen)


def pinned_for(optimizer: str | None, fix: Mapping[str, Any]) -> dict[str, Any]:
    """With what the optimizer needs pinned, too; raises PlanError where something else is."""
    needed = WHOLE_PARAMETERS if optimizer == "lamb" else {}
    for knob, value in needed.items():
        if fix.get(knob, value) != value:
            raise PlanError(
                f"--fix {knob}={fix[knob]}: LAMB takes norms of whole parameters; use "
                f"{knob}={value}, or --optimizer adamw"
            )
    return {**fix, **needed}


def check_pinned(fix: Mapping[str, Any], cluster: Cluster) -> None:
    """Refuses pinned knobs that no model could have on the cluster, before one is traced."""
    pinned = pinned_candidate(fix)
    why = knob_refusal(pinned)
    if not why and not can_grow_from(pinned):
        why = refusal(pinned)
    if why:
        raise PlanError(f"--fix {why}")
    order = pinned.mesh_order
    apart = [order.index("tp") < order.index(axis) for axis in ("dp_replicate", "dp_shard")]
    if "mesh_order" in fix and len(set(apart)) > 1:
        raise PlanError(
            f"--fix mesh_order={'/'.join(order)}: put tp before both of dp_replicate and "
            "dp_shard, or behind both, so that how far apart its ranks are does not hang on how "
            "dp is divided"
        )
    if pinned.sequence_parallel and fix.get("tp") == 1:
        raise PlanError("--fix sequence_parallel=true acts with tp above 1 only; pin tp=2 or more")
    if why := _averaging_pinned(fix, cluster):
        raise PlanError(f"--fix {why}")
    if pinned.num_devices > cluster.num_devices:
        raise PlanError(
            f"--fix asks for {pinned.num_devices} devices (pp x dp x tp); "
            f"the cluster {cluster.name!r} has {cluster.num_devices}"
        )


def _averaging_pinned(fix: Mapping[str, Any], cluster: Cluster) -> str:
    """Why no degrees that are left open let the pinned codec or algorithm act; or ''.

    Replicas are where most of them do, shards where codes of gradients do, too.
    """
    if not {"codec", "collective"} & fix.keys():
        return ""
    pinned = pinned_candidate(fix)
    tried = [pinned]
    if "dp_shard" not in fix:
        tried.insert(0, replace(pinned, dp_shard=2))
    if "dp_replicate" not in fix:
        tried.insert(0, replace(pinned, dp_replicate=2))
    tried = [one for one in tried if one is pinned or one.num_devices <= cluster.num_devices]
    found = [averaging_refusal(one) for one in tried]
    if all(found):
        return found[0]
    nodes = len(cluster.nodes)
    if nodes == 1 or all(node.device_count == 1 for node in cluster.nodes):
        return nodes_refusal(replace(pinned, dp_replicate=nodes), nodes)
    return ""


def batch_refusal(fix: Mapping[str, Any], batch: int) -> str:
    """Why the pinned knobs cannot share out the batch, with the nearest that they can; or ''."""
    pinned = Candidate(**fix)
    unit = pinned.dp * fix.get("microbatch_size", 1)
    if batch % unit == 0:
        return ""
    below, above = batch // unit * unit, -(-batch // unit) * unit
    near = f"{below} or {above}" if below else f"{above}"
    return (
        f"a global batch of {batch} is not a multiple of dp={pinned.dp} x "
        f"microbatch_size={fix.get('microbatch_size', 1)} = {unit}; nearest: {near}"
    )


def why_none(fix: Mapping[str, Any], batch: int, cluster: Cluster) -> str:
    """Why there is no candidate at all: nearly always a batch that nothing divides."""
    pinned = ",".join(f"{knob}={value}" for knob, value in fix.items())
    why = batch_refusal(fix, batch) or _schedule_refusal(fix, batch)
    return why or (
        f"no candidate agrees with --fix {pinned} on {cluster.num_devices} devices with a "
        f"global batch of {batch}: {CANNOT_ACT}"
    )


def _schedule_refusal(fix: Mapping[str, Any], batch: int) -> str:
    """Why the pinned schedule cannot run the pinned microbatches; or ''."""
    pinned = pinned_candidate(fix)
    if not {"schedule", "pp", "microbatch_size"} <= fix.keys():
        return ""
    return schedule_refusal(
        pinned.schedule, pinned.pp, pinned.num_microbatches(batch), pinned.stages_per_rank
    )
