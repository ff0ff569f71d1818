"""Whether the parts of a plan agree with each other: a plan may have been edited by hand.

The candidate decides; mesh, schedule, stages, sharding and communication write down what follows
from it, for people and for other programs. An edit of one alone would change nothing, or the
wrong thing, so it is refused. `simulate` and the executor check before they do anything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from claw_plan.planner.bucket_order import order_refusals
from claw_plan.planner.bucket_plan import check_sizes
from claw_plan.planner.candidate import MESH_ORDER, Candidate
from claw_plan.planner.errors import PlanError
from claw_plan.planner.graph import ModelGraph
from claw_plan.planner.model_source import LoadedModel, load_model
from claw_plan.planner.plan import Plan
from claw_plan.planner.plan_names import expert_rules
from claw_plan.planner.plan_stages import stage_spans
from claw_plan.planner.problem import WHOLE_PARAMETERS
from claw_plan.planner.schedules import rank_of_stage, schedule_refusal
from claw_plan.planner.supported import OF_MOMENTUM, knob_refusal, nodes_refusal, refusal
from claw_plan.planner.vocabulary_parallel import STYLES
from claw_plan.profiles.cluster import Cluster
from claw_plan.profiles.cluster_file import cluster_from_mapping
from claw_plan.profiles.codecs import LOW_RANK, ZERO_ONE, describe_codec


def check_plan(plan: Plan, where: str) -> Candidate:
    """The plan's candidate; raises PlanError for the first part that contradicts it.

    `where` (the file) opens every message.
    """
    if plan.mixed:
        kinds = dict.fromkeys(rank.kind for line in plan.mixed for rank in line.ranks)
        raise PlanError(
            f"{where}: the plan lies on unlike devices ({', '.join(kinds)}), which is simulated "
            "but not executed yet; plan again with a cluster of one kind of node"
        )
    try:
        candidate = plan.knobs()
        stage_spans(plan)
        problem = next(_problems(plan, candidate, where), None)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from None
    if problem is not None:
        raise PlanError(f"{where}: {problem}; change it, or plan again with --fix")
    return candidate


def model_of_plan(plan: Plan, path: Path) -> LoadedModel:
    """The model that a plan file names, checked to be the one that was planned."""
    file = path.parent / plan.model.file
    model = load_model(file, build=plan.model.build, inputs=plan.model.inputs)
    if model.sha256 != plan.model.sha256:
        raise PlanError(
            f"{path}: {plan.model.file} is not the file that was planned (its hash differs); "
            "plan again, so that times and memory are those of this model"
        )
    return model


def check_against_model(graph: ModelGraph, candidate: Candidate, plan: Plan) -> None:
    """What an edited plan can contradict in the model."""
    if plan.model.parameters != graph.num_parameters:
        raise PlanError(
            f"model.parameters is {plan.model.parameters}, but the model has "
            f"{graph.num_parameters}; plan again"
        )
    if candidate.buckets:
        check_sizes(candidate.buckets, sum(p.trainable for p in graph.parameters))
    tied = {p.names for p in graph.parameters if len(p.names) > 1}
    if {tuple(tie.parameters) for tie in plan.tied} != tied:
        named = "; ".join(" = ".join(names) for names in sorted(tied)) or "none"
        raise PlanError(f"tied must list the model's tied parameters once each: {named}")
    if not graph.takes_tp(candidate.tp):
        raise PlanError(
            f"candidate.tp is {candidate.tp}, which does not divide {graph.tp_divides} "
            "(the common divisor of the model's head counts)"
        )
    shared = {rule.modules for rule in plan.expert_parallel}
    expected_experts = {rule.modules for rule in expert_rules(graph, candidate.ep)}
    if shared != expected_experts:
        named = ", ".join(sorted(expected_experts)) or "none"
        raise PlanError(f"expert_parallel must name those modules that planning shares: {named}")
    if candidate.sequence_parallel and candidate.tp in graph.partial:
        raise PlanError(
            f"candidate.sequence_parallel needs a degree that divides {graph.tp_divides}, but "
            f"candidate.tp is {candidate.tp}, which leaves modules of the blocks whole"
        )
    ends = {rule.modules: rule.heads for rule in plan.tensor_parallel if rule.style in STYLES}
    expected = {rule.module: rule.heads for rule in graph.vocabulary_parallel}
    if candidate.tp > 1 and ends != expected:
        named = ", ".join(f"{name} ({rows} rows)" for name, rows in expected.items()) or "none"
        raise PlanError(
            f"tensor_parallel must divide those tables and heads that planning divides: {named}"
        )


def _optimizer(optimizer: str, candidate: Candidate) -> Iterator[str]:
    """What goes with other optimizers only."""
    for knob, value in WHOLE_PARAMETERS.items() if optimizer == "lamb" else ():
        if getattr(candidate, knob) != value:
            yield f"training.optimizer lamb takes norms of whole parameters; use {knob}={value}"
    if candidate.codec.partition(":")[0] == ZERO_ONE and optimizer != "adamw":
        yield "candidate.codec zero_one sends what AdamW moves; train with optimizer adamw"
    is_known = not knob_refusal(candidate)
    if is_known and describe_codec(candidate.codec).momentum and optimizer != "sgd":
        yield f"candidate.codec {candidate.codec} keeps the momentum of sgd; train with it"


def _problems(plan: Plan, candidate: Candidate, where: str) -> Iterator[str]:
    if reason := refusal(candidate):
        yield reason
    if reason := nodes_refusal(candidate, _nodes_of_replicas(plan)):
        yield reason
    if candidate.bucket_bytes < 1:
        yield f"candidate.bucket_bytes is at least 1, but got {candidate.bucket_bytes}"
    if candidate.buckets and not candidate.reduces_in_backward:
        yield "candidate.buckets act where dp_replicate is over 1, dp_shard and pp are 1"
    if candidate.bucket_order:
        yield from _bucket_order(plan, candidate)
    yield from _optimizer(plan.training.optimizer, candidate)
    precision, codec = plan.training.precision, candidate.codec.partition(":")[0]
    of_replicas = candidate.collective != "auto" or codec in (*OF_MOMENTUM, LOW_RANK)
    if precision != "float32" and of_replicas:
        yield (
            "candidate.collective, low_rank, and codecs that carry momentum, act in float32; "
            "gradients of lower precisions are sharded"
        )
    if precision == "float16" and codec != "none":
        yield (
            "candidate.codec keeps what it has not sent, which would be in units of a loss scale "
            "that moves; train in bfloat16 or float32"
        )
    if candidate.buckets and plan.training.precision != "float32":
        yield "candidate.buckets act in float32; gradients of lower precisions are sharded"
    if (plan.training.seq_len or 1) < 1:
        yield f"training.seq_len is at least 1, but got {plan.training.seq_len}"
    yield from _mesh(plan, candidate, cluster_from_mapping(plan.cluster, f"{where}: cluster"))
    yield from _schedule(plan, candidate)
    yield from _stages(plan, candidate)
    yield from _derived(plan, candidate)


def _nodes_of_replicas(plan: Plan) -> int:
    """Where replicas are all there is: the nodes that they lie on."""
    return len({device.partition(":")[0] for device in plan.mesh.devices})


def _bucket_order(plan: Plan, candidate: Candidate) -> Iterator[str]:
    """What buckets that the next forward waits for one by one cannot go together with."""
    count = len(candidate.buckets)
    if sorted(candidate.bucket_order) != [*range(count)]:
        yield (
            f"candidate.bucket_order names each of the {count} buckets once, from 0 on, but is "
            f"{[*candidate.bucket_order]}"
        )
    yield from order_refusals(candidate, plan.training.clip_norm)


def _mesh(plan: Plan, candidate: Candidate, cluster: Cluster) -> Iterator[str]:
    if candidate.num_devices > cluster.num_devices:
        yield (
            f"the plan uses {candidate.num_devices} devices (pp x dp x tp); its cluster has "
            f"{cluster.num_devices}"
        )
    axes = {axis: getattr(candidate, axis) for axis in MESH_ORDER}
    if plan.mesh.axes != axes:
        yield f"mesh.axes is {plan.mesh.axes}, but the candidate makes {axes}"
    known = {
        f"{index}:{device}"
        for index, node in enumerate(cluster.nodes)
        for device in range(node.device_count)
    }
    strange = [name for name in plan.mesh.devices if name not in known]
    if strange:
        yield f"mesh.devices names {strange[0]!r}; devices are node:device, as in '0:0'"
    distinct = len(set(plan.mesh.devices))
    if distinct != len(plan.mesh.devices) or distinct != candidate.num_devices:
        yield (
            f"mesh.devices names {distinct} different devices for "
            f"{len(plan.mesh.devices)} ranks; the candidate uses {candidate.num_devices}"
        )


def _schedule(plan: Plan, candidate: Candidate) -> Iterator[str]:
    schedule, batch = plan.schedule, plan.training.global_batch
    if schedule.name != candidate.schedule:
        yield f"schedule.name is {schedule.name}, candidate.schedule {candidate.schedule}"
    if schedule.stages_per_rank != candidate.stages_per_rank:
        yield (
            f"schedule.stages_per_rank is {schedule.stages_per_rank}, "
            f"candidate.stages_per_rank {candidate.stages_per_rank}"
        )
    count = candidate.num_microbatches(batch)
    if schedule.num_microbatches != count:
        yield (
            f"schedule.num_microbatches is {schedule.num_microbatches}, but a global batch of "
            f"{batch} over dp={candidate.dp} in microbatches of {candidate.microbatch_size} "
            f"makes {count}"
        )


def _stages(plan: Plan, candidate: Candidate) -> Iterator[str]:
    name, per_rank, ranks = candidate.schedule, candidate.stages_per_rank, candidate.pp
    if ranks > 1 or per_rank > 1:
        count = candidate.num_microbatches(plan.training.global_batch)
        if why := schedule_refusal(name, ranks, count, per_rank):
            yield why
    if len(plan.stages) != ranks * per_rank:
        yield (
            f"candidate.pp is {ranks} with stages_per_rank={per_rank}, but stages lists "
            f"{len(plan.stages)}"
        )
    for index, stage in enumerate(plan.stages):
        home = rank_of_stage(name, index, ranks)
        if stage.rank_group != home:
            yield f"stages[{index}].rank_group is {home}, but got {stage.rank_group}"
    last = len(plan.stages) - 1
    for index, tie in enumerate(plan.tied):
        if any(not 0 <= stage <= last for stage in tie.stages):
            yield f"tied[{index}].stages are 0 to {last}, but got {tie.stages}"


def _derived(plan: Plan, candidate: Candidate) -> Iterator[str]:
    if candidate.tp > 1 and not plan.tensor_parallel:
        yield f"candidate.tp is {candidate.tp}, but tensor_parallel holds no rule"
    if candidate.ep > 1 and not plan.expert_parallel:
        yield f"candidate.ep is {candidate.ep}, but expert_parallel holds no rule"
    for index, shard in enumerate(plan.sharding):
        if shard.zero != candidate.zero:
            yield f"sharding[{index}].zero is {shard.zero}, candidate.zero {candidate.zero}"
    for index, used in enumerate(plan.communication):
        if getattr(candidate, used.axis, 1) == 1 or used.axis not in (*MESH_ORDER, "ep"):
            yield f"communication[{index}].axis is {used.axis!r}, which the candidate does not use"
        if (used.algorithm, used.codec) != (candidate.collective, candidate.codec):
            yield f"communication[{index}] differs from candidate.collective and candidate.codec"
