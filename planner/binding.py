"""What a step's duration hangs on, and by which parts two steps differ.

`binds` reads the critical path: what must become shorter for the step to become shorter. Traffic
is told with the link it runs on. `difference` compares the busiest stage of two plans part by
part; those parts add up to each step time, so their differences add up to the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.lower import lower
from claw_plan.planner.pass_time import HOST
from claw_plan.planner.placement import crosses_node, group_nodes
from claw_plan.planner.problem import Problem
from claw_plan.planner.score import Scored, Scorer
from claw_plan.planner.step_time import OVERLAP, simulated

PART_NAMES = {
    "compute": "compute",
    "recompute": "recompute",
    "tp_comm_exposed": "tp",
    "dp_comm_exposed": "dp",
    "pp_comm_exposed": "pp",
    "pp_bubble": "pp bubble",
    "optimizer": "optimizer",
    "overhead": "host",
}
"""Short names of `Scored.parts_ns`, for tables of differences."""

TRAFFIC = ("tp", "cp", "ep", "dp", "pp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """The critical path by part (they add up to the step), and what the largest stands for.

    `fullest` is the part of the usable memory that the fullest stage takes.
    """

    parts_ns: Mapping[str, int]
    binds: str
    link: str
    fullest: float
    stage: int


def binding_of(scorer: Scorer, scored: Scored) -> Binding:
    """What holds a candidate back."""
    lowered = lower(scorer.problem, scorer.shards, scored.candidate, scored.cuts)
    step = simulated(lowered)
    grouped: dict[str, float] = {}
    for name, ns in step.parts_ns.items():
        group = _group(name)
        grouped[group] = grouped.get(group, 0.0) + ns
    parts = _rounded(grouped, scored.step_time_ns)
    binds = max(parts, key=lambda name: parts[name])
    full = max(scored.memory, key=lambda stage: stage.peak_bytes / stage.capacity_bytes)
    slowest = max(TRAFFIC, key=lambda axis: parts.get(axis, 0))
    link = link_of(scorer.problem, scored.candidate, slowest) if parts.get(slowest, 0) else ""
    return Binding(
        parts_ns=parts,
        binds=binds,
        link=f"{slowest} over {link}" if link else "",
        fullest=full.peak_bytes / full.capacity_bytes,
        stage=full.stage,
    )


def _group(part: str) -> str:
    if part in (*TRAFFIC, OVERLAP, "optimizer"):
        return part
    return "host" if part in (HOST, "other") else "compute"


def _rounded(parts: Mapping[str, float], whole: int) -> dict[str, int]:
    """Whole nanoseconds that add up to `whole`; what rounding leaves goes to the largest."""
    rounded = {name: round(ns) for name, ns in parts.items() if round(ns)}
    largest = max(rounded, key=lambda name: rounded[name])
    rounded[largest] += whole - sum(rounded.values())
    return dict(sorted(rounded.items(), key=lambda part: -part[1]))


def link_of(problem: Problem, candidate: Candidate, axis: str) -> str:
    """The link that the traffic of an axis is as slow as: inside a node, or between nodes."""
    per_node, node = problem.devices_per_node, problem.cluster.nodes[0]
    if axis == "pp":
        crosses = any(crosses_node(candidate, stage, per_node) for stage in range(candidate.pp))
    elif axis == "dp":
        axes = [name for name in ("dp_replicate", "dp_shard") if getattr(candidate, name) > 1]
        crosses = any(group_nodes(candidate, name, per_node) > 1 for name in axes)
    else:
        crosses = group_nodes(candidate, "cp" if axis == "ep" else axis, per_node) > 1
    return node.nic.name if crosses else node.intra.name


def difference(first: Scored, second: Scored) -> dict[str, int]:
    """Nanoseconds by which the second's parts are longer; they add up to that of the steps."""
    names = dict.fromkeys([*first.parts_ns, *second.parts_ns])
    return {
        PART_NAMES.get(name, name): second.parts_ns.get(name, 0) - first.parts_ns.get(name, 0)
        for name in names
    }
