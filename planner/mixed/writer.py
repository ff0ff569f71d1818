"""From a way over unlike devices to a `Plan` and back: its part `mixed` names every device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from claw_plan.planner.errors import PlanError
from claw_plan.planner.mixed.kinds import MixedProblem
from claw_plan.planner.mixed.plan import MixedCandidate, MixedRank, Pipeline
from claw_plan.planner.mixed.score import MixedScored
from claw_plan.planner.model_source import LoadedModel
from claw_plan.planner.plan import (
    Plan,
    PlanMesh,
    PlanPipeline,
    PlanRank,
    PlanStage,
    candidate_from,
    candidate_mapping,
)
from claw_plan.planner.plan_stages import cuts_of_plan
from claw_plan.planner.plan_writer import predict, stage_modules, write_plan
from claw_plan.planner.schedules import rank_of_stage
from claw_plan.profiles.errors import near_matches


def write_mixed_plan(
    problem: MixedProblem,
    scored: MixedScored,
    model: LoadedModel,
    *,
    folder: Path,
    profile: str,
    search: Mapping[str, Any],
) -> Plan:
    """The plan of a way over unlike devices."""
    first = scored.mixed.pipelines[0]
    kind = problem.kinds[first.ranks[0].kind]
    plan = write_plan(
        kind.with_batch(first.batch), scored, model, folder=folder, profile=profile, search=search
    )
    pipelines = [_pipeline(problem, pipeline) for pipeline in scored.mixed.pipelines]
    whole = problem.whole
    devices = [name for line in pipelines for rank in line.ranks for name in rank.devices]
    batch = whole.training.global_batch
    return plan.model_copy(
        update={
            "training": plan.training.model_copy(update={"global_batch": batch}),
            "mesh": PlanMesh(axes=plan.mesh.axes, devices=devices),
            "mixed": pipelines,
            "prediction": predict(scored, profile, search, whole.trainer),
        }
    )


def _pipeline(problem: MixedProblem, pipeline: Pipeline) -> PlanPipeline:
    first, graph = pipeline.ranks[0].candidate, problem.whole.graph
    return PlanPipeline(
        batch=pipeline.batch,
        num_microbatches=first.num_microbatches(pipeline.batch),
        ranks=[
            PlanRank(
                kind=problem.kinds[rank.kind].name,
                devices=devices_of(problem, rank),
                candidate=candidate_mapping(rank.candidate),
            )
            for rank in pipeline.ranks
        ],
        stages=[
            PlanStage(
                rank_group=rank_of_stage(first.schedule, index, first.pp),
                modules=stage_modules(graph, start, stop),
            )
            for index, (start, stop) in enumerate(pipeline.cuts)
        ],
    )


def devices_of(problem: MixedProblem, rank: MixedRank) -> list[str]:
    """node:device of a rank."""
    first = rank.place * rank.num_devices
    return problem.kinds[rank.kind].device_names()[first : first + rank.num_devices]


def mixed_of_plan(plan: Plan, problem: MixedProblem) -> MixedCandidate:
    """The way that a plan on unlike devices names. Raises PlanError for what it cannot be."""
    pipelines = tuple(_read_pipeline(plan, line, problem) for line in plan.mixed)
    batch = sum(pipeline.batch for pipeline in pipelines)
    if batch != plan.training.global_batch:
        raise PlanError(
            f"the pipelines take {batch} samples together, but training.global_batch is "
            f"{plan.training.global_batch}"
        )
    return MixedCandidate(pipelines=pipelines)


def _read_pipeline(plan: Plan, line: PlanPipeline, problem: MixedProblem) -> Pipeline:
    ranks = tuple(_read_rank(rank, problem) for rank in line.ranks)
    own = plan.model_copy(update={"stages": line.stages})
    return Pipeline(batch=line.batch, ranks=ranks, cuts=cuts_of_plan(own, problem.whole.graph))


def _read_rank(rank: PlanRank, problem: MixedProblem) -> MixedRank:
    names = {name: index for index, name in enumerate(problem.names)}
    if rank.kind not in names:
        raise PlanError(f"mixed: no kind {rank.kind!r}; {near_matches(rank.kind, names)}")
    candidate = candidate_from(rank.candidate)
    kind = problem.kinds[names[rank.kind]]
    known, wide = kind.device_names(), candidate.dp * candidate.tp
    place = known.index(rank.devices[0]) // wide if rank.devices[0] in known else -1
    if place < 0 or known[place * wide : (place + 1) * wide] != rank.devices:
        raise PlanError(
            f"mixed: a rank of dp x tp = {wide} on {rank.kind} takes as many neighbouring "
            f"devices from a multiple of {wide} on, but got {', '.join(rank.devices[:4])}…"
        )
    return MixedRank(kind=names[rank.kind], place=place, candidate=candidate)
