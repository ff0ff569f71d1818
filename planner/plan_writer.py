"""From a scored candidate to a `Plan`: names of modules in place of unit indices."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from claw_plan.planner.candidate import ALL_TO_ALL, Candidate
from claw_plan.planner.expert_tensor_parallel import tensor_rule
from claw_plan.planner.graph import ModelGraph, TensorParallelRule
from claw_plan.planner.model_source import LoadedModel
from claw_plan.planner.placement import device_names
from claw_plan.planner.plan import (
    Plan,
    PlanCommunication,
    PlanMesh,
    PlanModel,
    PlanPrediction,
    PlanSchedule,
    PlanSharding,
    PlanStage,
    PlanTensorParallel,
    PlanTie,
    PlanTraffic,
    PlanTraining,
    candidate_mapping,
)
from claw_plan.planner.plan_names import block_patterns, expert_rules
from claw_plan.planner.problem import Problem
from claw_plan.planner.schedules import rank_of_stage
from claw_plan.planner.score import Scored
from claw_plan.planner.shards import ShardSizes
from claw_plan.planner.traffic import predict_traffic, rows_of
from claw_plan.profiles.cost import ANALYTIC, FITTED, INTERPOLATED, MEASURED
from claw_plan.profiles.fitted import UNKNOWN
from claw_plan.profiles.trainer import NEUTRAL, Trainer
from claw_plan.profiles.units import gib, ms_from_ns

HALF_WIDTH = {MEASURED: 0.05, INTERPOLATED: 0.08, FITTED: 0.15, ANALYTIC: 0.25}
"""Half width of the 90 % interval by what the kernel times rest on, as a fraction. Judgement, not
a fit: planners' published errors are 2-8 % on measured kernels and 10-40 % without."""

MOST_COUNTED = 64
"""Ranks of a plan whose traffic is predicted rank by rank: the step is lowered for each place."""

WITHOUT_PROFILE = UNKNOWN
"""The same where a trainer's constants stand in for a profile: the user's software is one more."""


def write_plan(
    problem: Problem,
    scored: Scored,
    model: LoadedModel,
    *,
    folder: Path,
    profile: str,
    search: Mapping[str, Any],
) -> Plan:
    """The plan of a candidate; the model's file is named relative to `folder`."""
    graph, training, candidate = problem.graph, problem.training, scored.candidate
    microbatches = candidate.num_microbatches(training.global_batch)
    return Plan(
        version=1,
        model=PlanModel(
            file=os.path.relpath(model.path.resolve(), folder.resolve()),
            sha256=model.sha256,
            build=model.build_text,
            inputs=model.inputs_text,
            parameters=graph.num_parameters,
        ),
        training=PlanTraining(
            global_batch=training.global_batch,
            seq_len=training.seq_len,
            precision=training.precision,  # type: ignore[arg-type]  # checked by pydantic
            optimizer=training.optimizer,  # type: ignore[arg-type]
            clip_norm=training.clip_norm,
            seed=training.seed,
        ),
        cluster=dict(problem.cluster.text),
        candidate=candidate_mapping(candidate),
        mesh=PlanMesh(
            axes={axis: getattr(candidate, axis) for axis in candidate.mesh_order},
            devices=device_names(candidate, [n.device_count for n in problem.cluster.nodes]),
        ),
        schedule=PlanSchedule(
            name=candidate.schedule,
            stages_per_rank=candidate.stages_per_rank,
            num_microbatches=microbatches,
        ),
        blocks=[block.name for block in graph.blocks],
        stages=[
            PlanStage(
                rank_group=rank_of_stage(candidate.schedule, index, candidate.pp),
                modules=stage_modules(graph, start, stop),
            )
            for index, (start, stop) in enumerate(scored.cuts)
        ],
        tied=_ties(graph, scored),
        tensor_parallel=_tensor_parallel(graph, candidate.tp) if candidate.tp > 1 else [],
        expert_parallel=expert_rules(graph, candidate.ep),
        sharding=_sharding(graph, candidate) if candidate.shard_ranks > 1 else [],
        communication=_communication(graph, candidate),
        prediction=predict(scored, profile, search, problem.trainer).model_copy(
            update={"traffic": _traffic(problem, scored)}
        ),
    )


def _traffic(problem: Problem, scored: Scored) -> list[PlanTraffic] | None:
    """What every rank moves, where there are not too many of them."""
    if scored.candidate.num_devices > MOST_COUNTED:
        return None
    shards = ShardSizes(problem.graph)
    return rows_of(predict_traffic(problem, shards, scored.candidate, scored.cuts))


def predict(
    scored: Scored, profile: str, search: Mapping[str, Any], trainer: Trainer = NEUTRAL
) -> PlanPrediction:
    """The expectation that a run is compared with."""
    step_ms = ms_from_ns(scored.step_time_ns)
    width = sum(HALF_WIDTH.get(name, 0.25) * share for name, share in scored.sources.items())
    if trainer is not NEUTRAL:
        width = WITHOUT_PROFILE
    return PlanPrediction(
        step_time_ms=round(step_ms, 6),
        interval_ms=(round(step_ms * (1 - width), 3), round(step_ms * (1 + width), 3)),
        samples_per_s=scored.samples_per_s,
        tokens_per_s=scored.tokens_per_s,
        mfu=scored.mfu,
        memory_gib=[round(gib(stage.peak_bytes), 3) for stage in scored.memory],
        profile=profile,
        search=dict(search),
    )


def stage_modules(graph: ModelGraph, start: int, stop: int) -> list[str]:
    """The modules of a stage, runs of blocks folded."""
    modules: list[str] = []
    last = len(graph.units) - 1
    if start == 0:
        modules += graph.units[0].modules
    modules += fold_names([graph.units[u].name for u in range(max(start, 1), min(stop, last))])
    if stop == last + 1:
        modules += [name for name in graph.units[last].modules if name not in modules]
    return modules


def fold_names(names: Sequence[str]) -> list[str]:
    """['h.0', 'h.1', 'h.2'] to ['h[0:3]']; what has no number at its end stays as it is."""
    folded: list[str] = []
    for (prefix, _), run in groupby(enumerate(names), key=_run_key):
        members = [name for _, name in run]
        if prefix is None or len(members) == 1:
            folded += members
        else:
            first = int(members[0].rpartition(".")[2])
            folded.append(f"{prefix}[{first}:{first + len(members)}]")
    return folded


def _run_key(entry: tuple[int, str]) -> tuple[str | None, int]:
    """Equal for neighbours whose numbers follow each other under one prefix."""
    position, name = entry
    prefix, _, number = name.rpartition(".")
    if not number.isdecimal() or not prefix:
        return None, position
    return prefix, int(number) - position


def _tensor_parallel(graph: ModelGraph, tp: int) -> list[PlanTensorParallel]:
    inside = [
        _rule(rule, f"{pattern}.{rule.module}" if rule.module else pattern)
        for rule in graph.rules_at(tp)
        for pattern in block_patterns(graph, rule.structures)
    ]
    inside += [
        _rule(tensor_rule(rule), f"{pattern}.{rule.module}")
        for rule in (graph.expert_parallel if tp not in graph.partial else ())
        for pattern in (block_patterns(graph, rule.structures) if rule.inner else ())
    ]
    return inside + [_rule(rule, rule.module) for rule in graph.vocabulary_parallel]


def _rule(rule: TensorParallelRule, modules: str) -> PlanTensorParallel:
    return PlanTensorParallel(
        modules=modules,
        style=rule.style,  # type: ignore[arg-type]  # checked by pydantic
        heads=rule.heads,
        parts=rule.parts,
        weight_dims=dict(rule.weight_dims),
    )


def _sharding(graph: ModelGraph, candidate: Candidate) -> list[PlanSharding]:
    blocks = [
        PlanSharding(modules=pattern, zero=candidate.zero) for pattern in block_patterns(graph, ())
    ]
    return [*blocks, PlanSharding(modules="*", zero=candidate.zero)]


def _communication(graph: ModelGraph, candidate: Candidate) -> list[PlanCommunication]:
    used = []
    if candidate.shard_ranks > 1:
        shards = "dp_shard" if candidate.dp_shard > 1 else "cp"
        used += [(shards, "all_gather"), (shards, "reduce_scatter")]
    if candidate.cp > 1 and candidate.cp_comm_type == ALL_TO_ALL:
        used.append(("cp", "all_to_all"))
    elif candidate.cp > 1 and candidate.dp_shard > 1:
        used += [("cp", "all_gather"), ("cp", "reduce_scatter")]
    if candidate.dp_replicate > 1:
        used.append(("dp_replicate", "all_reduce"))
    if candidate.tp > 1:
        if candidate.sequence_parallel:
            used += [("tp", "all_gather"), ("tp", "reduce_scatter")]
        if graph.vocabulary_parallel or not candidate.sequence_parallel:
            used.append(("tp", "all_reduce"))
    if candidate.ep > 1:
        used.append(("ep", "all_to_all"))
    if candidate.pp > 1:
        used.append(("pp", "send"))
    return [
        PlanCommunication(axis=axis, op=op, algorithm=candidate.collective, codec=candidate.codec)
        for axis, op in used
    ]


def _ties(graph: ModelGraph, scored: Scored) -> list[PlanTie]:
    ties = []
    for parameter in graph.parameters:
        if len(parameter.names) < 2:
            continue
        stages = [
            index
            for index, (start, stop) in enumerate(scored.cuts)
            if any(start <= unit < stop for unit in parameter.units)
        ]
        ties.append(PlanTie(parameters=list(parameter.names), stages=stages))
    return ties
