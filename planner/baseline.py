"""A `Setting` of other training software to a scored candidate of our problem.

What the file leaves open is chosen at its best, so that the comparison is fair to it. Stages are
cut evenly, as all of those trainers do by themselves. A setting that does not fit is scored too:
its time and its shortage of memory are the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from claw_plan.planner.baselines.setting import NODE, REST, Setting
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.errors import PlanError
from claw_plan.planner.members import divisors
from claw_plan.planner.pinned import MOST_MICROBATCHES
from claw_plan.planner.schedules import schedule_refusal
from claw_plan.planner.score import Scored, Scorer
from claw_plan.planner.stage_path import Cuts
from claw_plan.planner.supported import refusal
from claw_plan.profiles.cluster import Cluster
from claw_plan.profiles.units import format_bytes

UNSIMULATED = {
    "cp": "context parallelism is not simulated for a baseline (--fix cp plans with it)",
    "ep": "expert parallelism is not simulated for a baseline (--fix ep plans with it)",
}
"""Axes whose traffic a traced graph does not have."""

OPEN_KNOBS = {"recompute": ("none", "full"), "zero": (3,)}
"""What is tried of a knob that a file leaves open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The user's own setting. `scored` is None where `refused` says why it cannot be scored.

    `offered` is whether the search could have answered with it; `notes` are sentences.
    """

    name: str
    scored: Scored | None
    refused: str = ""
    offered: bool = False
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """By how much and where it runs out of memory; empty when it fits."""
        return "" if self.scored is None else shortage_of(self.scored)


def shortage_of(scored: Scored) -> str:
    """By how much and where a candidate runs out of memory; empty when it fits."""
    worst = max(scored.memory, key=lambda stage: stage.peak_bytes - stage.capacity_bytes)
    missing = worst.peak_bytes - worst.capacity_bytes
    if missing <= 0:
        return ""
    return (
        f"out of memory: stage {worst.stage} needs {format_bytes(worst.peak_bytes)} of "
        f"{format_bytes(worst.capacity_bytes)} on each device, {format_bytes(missing)} too much"
    )


def training_of(setting: Setting, cluster: Cluster) -> dict[str, Any]:
    """What the file says is trained, the batch worked out from its parts where it can be."""
    values = dict(setting.training)
    knobs = setting.knobs
    if "global_batch" not in values and setting.accumulation and "microbatch_size" in knobs:
        degrees = degrees_of(setting, cluster)
        ranks = degrees["dp_replicate"] * degrees["dp_shard"]
        values["global_batch"] = ranks * setting.accumulation * knobs["microbatch_size"]
    return values


def degrees_of(setting: Setting, cluster: Cluster) -> dict[str, Any]:
    """The file's knobs with numbers for REST and NODE. Raises PlanError when they do not divide.

    The file's own number of devices counts, all of the cluster's where it says none or more.
    """
    devices = min(setting.devices or cluster.num_devices, cluster.num_devices)
    knobs = dict(setting.knobs)
    if knobs.get("dp_shard") == NODE:
        inside = min(node.device_count for node in cluster.nodes)
        knobs["dp_shard"] = max(1, inside // knobs.get("tp", 1))
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    fixed = 1
    for axis in axes:
        fixed *= knobs[axis] if knobs[axis] != REST else 1
    rest = [axis for axis in axes if knobs[axis] == REST]
    if fixed > devices or (rest and devices % fixed):
        product = " x ".join(
            f"{axis}={knobs[axis]}" for axis in axes if knobs[axis] not in (1, REST)
        )
        place = setting.place("tp" if knobs["tp"] > 1 else "pp")
        raise PlanError(f"{place}: {product} = {fixed} does not divide the {devices} devices")
    for index, axis in enumerate(rest):
        knobs[axis] = devices // fixed if index == 0 else 1
    return knobs


def baseline_of(setting: Setting, scorer: Scorer) -> Baseline:
    """Scores the setting on the scorer's problem."""
    notes = [*setting.left_out, *_differences(setting, scorer)]
    try:
        choices = list(_choices(setting, scorer))
    except PlanError as error:
        return Baseline(name=setting.name, scored=None, refused=str(error), notes=tuple(notes))
    best = min(choices, key=lambda choice: _rank(scorer, *choice))
    scored = scorer.score(*best)
    stages = best[0].pp * best[0].stages_per_rank
    if stages > 1 and len(scorer.problem.graph.blocks) % stages:
        notes.append(f"{setting.file}: the blocks do not divide evenly; the best cut is taken")
    if len(choices) > 1:
        chosen = f"microbatch {best[0].microbatch_size}, recompute {best[0].recompute}"
        notes.append(f"{setting.file}: what it leaves open is chosen at its best ({chosen})")
    if best[0].recompute == "attention":
        notes.append(
            f"{setting.place('recompute')}: a flash kernel keeps no scores, so that selective "
            "recomputation saves little here"
        )
    return Baseline(
        name=setting.name, scored=scored, offered=not refusal(best[0]), notes=tuple(notes)
    )


def _rank(scorer: Scorer, candidate: Candidate, cuts: Cuts) -> tuple[int, int]:
    """What fits before what does not, then the faster; of what does not, the closest."""
    missing = max(s.peak_bytes - s.capacity_bytes for s in scorer.memory.stages(candidate, cuts))
    return (missing, 0) if missing > 0 else (0, scorer.step_time_ns(candidate, cuts))


def _differences(setting: Setting, scorer: Scorer) -> Iterator[str]:
    """Where what is planned differs from what the file trains."""
    training, cluster = scorer.problem.training, scorer.problem.cluster
    for name, value in training_of(setting, cluster).items():
        planned = getattr(training, name)
        if planned != value and not (name == "clip_norm" and planned is None):
            place = setting.place(name)
            yield f"{place}: its {name} {value} is compared at the planned {planned}"
    if setting.devices and setting.devices != cluster.num_devices:
        yield (
            f"{setting.file}: it starts {setting.devices} devices, the cluster has "
            f"{cluster.num_devices}"
        )


def _choices(setting: Setting, scorer: Scorer) -> Iterator[tuple[Candidate, Cuts]]:
    """The candidates that agree with the file. Raises PlanError when there is none."""
    problem = scorer.problem
    knobs, batch = degrees_of(setting, problem.cluster), problem.training.global_batch
    for axis, why in UNSIMULATED.items():
        if knobs.get(axis, 1) > 1:
            raise PlanError(f"{setting.place(axis)}: {why}")
    _check_model(setting, knobs, scorer)
    ranks = knobs["dp_replicate"] * knobs["dp_shard"]
    if batch % ranks:
        raise PlanError(
            f"{setting.file}: a global batch of {batch} does not divide over {ranks} ranks of "
            "data parallelism"
        )
    refused = ""
    found = False
    for size in _microbatches(setting, batch // ranks):
        for recompute in (
            (knobs["recompute"],) if "recompute" in knobs else OPEN_KNOBS["recompute"]
        ):
            candidate = _candidate({**knobs, "microbatch_size": size, "recompute": recompute})
            if why := _cannot_run(candidate, batch):
                refused = f"{setting.place('microbatch_size')}: {why}"
                continue
            found = True
            yield candidate, _even_cuts(scorer, candidate)
    if not found:
        raise PlanError(refused)


def _microbatches(setting: Setting, samples: int) -> list[int]:
    """What a rank's samples may be cut into."""
    if "microbatch_size" in setting.knobs:
        return [int(setting.knobs["microbatch_size"])]
    if setting.accumulation and samples % setting.accumulation == 0:
        return [samples // setting.accumulation]
    return divisors(samples)


def _cannot_run(candidate: Candidate, batch: int) -> str:
    try:
        count = candidate.num_microbatches(batch)
    except PlanError as error:
        return str(error)
    if count > MOST_MICROBATCHES:
        return f"{count} microbatches are more than are simulated ({MOST_MICROBATCHES})"
    if candidate.pp == 1:
        return ""
    return schedule_refusal(candidate.schedule, candidate.pp, count, candidate.stages_per_rank)


def _candidate(knobs: Mapping[str, Any]) -> Candidate:
    """The knobs at the values under which the space lists what they do."""
    values = {name: value for name, value in knobs.items() if name != "etp"}
    if values["dp_shard"] == 1:
        values.pop("zero", None)
    elif values["pp"] > 1 and values.get("zero") == 2:
        values["zero"] = 1  # under a pipeline gradients are reduced once a step
    return Candidate(**values)


def _check_model(setting: Setting, knobs: Mapping[str, Any], scorer: Scorer) -> None:
    graph, tp = scorer.problem.graph, knobs["tp"]
    if tp > 1 and (graph.no_tensor_parallel or not graph.takes_tp(tp)):
        why = graph.no_tensor_parallel or f"the model's heads divide by {graph.tp_divides} only"
        raise PlanError(f"{setting.place('tp')}: {why}")
    stages = knobs["pp"] * knobs["stages_per_rank"]
    blocks = len(graph.blocks)
    if stages > max(1, blocks):
        where = setting.place("pp")
        raise PlanError(f"{where}: the model's {blocks} blocks make no {stages} stages")


def _even_cuts(scorer: Scorer, candidate: Candidate) -> Cuts:
    """Stages of as many blocks each; the best cut where they do not divide."""
    graph = scorer.problem.graph
    stages, blocks = candidate.pp * candidate.stages_per_rank, len(graph.blocks)
    each, rest = divmod(blocks, stages)
    edges = [0, *(1 + each * stage for stage in range(1, stages)), blocks + 2]
    if not rest and all(edge not in graph.cut_refused for edge in edges[1:-1]):
        return tuple(pairwise(edges))
    path = scorer.bounds.stage_path(candidate)
    if path is None:
        raise PlanError(f"pp={candidate.pp}: the model cannot be cut into {stages} stages")
    return path.cuts
