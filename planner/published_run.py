"""A published run as a `Problem` and a `Candidate`: what the planner would score for its plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from claw_plan.planner.accumulation import with_fused_accumulation
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.errors import PlanError
from claw_plan.planner.graph import ModelGraph
from claw_plan.planner.low_precision import with_linear_dtype
from claw_plan.planner.lower import Cuts
from claw_plan.planner.problem import Problem, Training
from claw_plan.planner.reference_model import Division
from claw_plan.planner.reference_trace import trace_reference
from claw_plan.planner.schedules import INTERLEAVED
from claw_plan.profiles.cluster import Cluster
from claw_plan.profiles.cost import CostModel
from claw_plan.profiles.cost_model import ClusterCostModel
from claw_plan.profiles.trainer import Trainer
from claw_plan.profiles.training_row import Dimensions, PublishedPlan, TrainingRow

COMPILED_MEMORY, COMPILED_HOST = 0.65, 0.5
"""torch.compile fuses element-wise kernels and launches fewer: what is left of their bytes and of
the host's time (torchtitan's published runs with and without; read off, not fitted)."""

GRAPHS_HOST = 0.25
"""What of the host's time CUDA graphs leave (same source: MLPerf's runs with graphs)."""

ASYNC_TP = 0.5
"""What asynchronous tensor parallelism leaves exposed: its products run in two halves, each
beside the other's traffic."""

NOT_OVERLAPPED_TP = 2.0
"""How much more of tensor parallelism's traffic is exposed where a trainer that overlaps it as a
rule does not: half of the collectives hide behind the products they feed."""

CostOf = Callable[[Cluster], CostModel]
"""The cost model of a cluster."""

ZERO = {"none": 2, "zero1": 1, "zero2": 2, "zero3": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """All that a prediction takes."""

    problem: Problem
    candidate: Candidate
    cuts: Cuts


def cost_without_launches(cluster: Cluster) -> CostModel:
    """The cost model for trainers, whose `host_ns` counts launches."""
    return ClusterCostModel(cluster, with_launches=False)


def pose(
    row: TrainingRow, trainer: Trainer, cost_of: CostOf = cost_without_launches
) -> PublishedRun:
    """The run under a trainer's constants. Raises PlanError for what cannot be expressed."""
    plan = row.plan
    trainer = with_settings(trainer, plan)
    candidate = _candidate(plan)
    if candidate.num_devices > row.cluster.num_devices:
        raise PlanError(
            f"the plan uses {candidate.num_devices} devices, the cluster has "
            f"{row.cluster.num_devices}"
        )
    graph = _graph(row.dimensions, _division(plan, trainer), plan, trainer)
    training = Training(
        global_batch=plan.global_batch,
        seq_len=row.dimensions.seq_len,
        precision=plan.dtype,
        optimizer=row.optimizer,
        memory_headroom=0.0,
    )
    problem = Problem(
        graph=graph,
        cluster=row.cluster,
        cost=cost_of(row.cluster),
        training=training,
        trainer=trainer,
    )
    return PublishedRun(problem=problem, candidate=candidate, cuts=_cuts(row.dimensions, plan))


def with_settings(trainer: Trainer, plan: PublishedPlan) -> Trainer:
    """The trainer with what the run's own settings change in it."""
    memory, host, tp = 1.0, 1.0, 1.0
    if plan.compiled:
        memory, host = memory * COMPILED_MEMORY, host * COMPILED_HOST
    if plan.cuda_graphs:
        host *= GRAPHS_HOST
    if plan.async_tp:
        tp *= ASYNC_TP
    if not plan.overlaps_tp:
        tp *= NOT_OVERLAPPED_TP
    is_float8 = plan.linear_dtype == "float8" and plan.scaling == "tensor"
    return replace(
        trainer,
        gathers_float8=trainer.gathers_float8 and is_float8,
        memory_scale=trainer.memory_scale * memory,
        host_ns=trainer.host_ns * host,
        tp_scale=trainer.tp_scale * tp,
    )


def _candidate(plan: PublishedPlan) -> Candidate:
    shards = plan.sharding in ("zero1", "zero2", "zero3")
    within = min(plan.shard_group or plan.dp, plan.dp) if shards else 1
    return Candidate(
        pp=plan.pp,
        dp_replicate=plan.dp // within,
        dp_shard=within,
        cp=plan.cp,
        tp=plan.tp,
        ep=plan.ep,
        etp=plan.etp,
        # Under a pipeline the next microbatch takes the gathered parameters at once.
        zero=min(ZERO[plan.sharding], 3 if plan.reshard and plan.pp == 1 else 2),
        sequence_parallel=plan.sequence_parallel and plan.tp > 1,
        schedule=INTERLEAVED if plan.vpp > 1 else "1F1B",
        stages_per_rank=plan.vpp,
        microbatch_size=plan.micro_batch,
        recompute=plan.recompute,
    )


def _division(plan: PublishedPlan, trainer: Trainer) -> Division:
    return Division(
        tp=plan.tp,
        sequence_parallel=plan.sequence_parallel and plan.tp > 1,
        cp=plan.cp,
        cp_kind=plan.cp_kind,
        ep=plan.ep,
        etp=plan.etp,
        fused_attention=trainer.fused_attention,
        fused_loss=trainer.fused_loss,
    )


def _graph(
    dims: Dimensions, division: Division, plan: PublishedPlan, trainer: Trainer
) -> ModelGraph:
    sum_bytes = trainer.gradient_bytes if trainer.fuses_accumulation else 0
    return _traced(dims, division, plan.dtype, plan.linear_dtype, plan.scaling, sum_bytes)


@lru_cache(maxsize=1024)
def _traced(
    dims: Dimensions,
    division: Division,
    dtype: str,
    linear_dtype: str,
    scaling: str,
    sum_bytes: int,
) -> ModelGraph:
    graph = trace_reference(dims, division, dtype)
    if sum_bytes:
        graph = with_fused_accumulation(graph, sum_bytes)
    return with_linear_dtype(graph, linear_dtype, scaling) if linear_dtype else graph


def _cuts(dims: Dimensions, plan: PublishedPlan) -> Cuts:
    """The units [start, stop) of every stage; prologue and epilogue lie at the ends."""
    layers = plan.layers_per_stage or layers_per_stage(dims.layers, plan.pp * plan.vpp)
    if sum(layers) != dims.layers or len(layers) != plan.pp * plan.vpp or min(layers) < 0:
        raise PlanError(
            f"{dims.layers} layers do not lie on {plan.pp} x {plan.vpp} stages as {layers}"
        )
    edges = [0]
    for count in layers:
        edges.append(edges[-1] + count)
    stops = [1 + edge for edge in edges[1:]]
    stops[-1] += 1
    return tuple(zip([0, *stops[:-1]], stops, strict=True))


def layers_per_stage(layers: int, stages: int) -> tuple[int, ...]:
    """Equal stages; else equal with embedding and head counted as layers; else as even as can be.

    Where neither divides, the first stages take one more (Megatron-DeepSpeed's 'uniform').
    """
    each, rest = divmod(layers, stages)
    if not rest:
        return (each,) * stages
    each, rest = divmod(layers + 2, stages)
    if not rest and each > 1 and stages > 1:
        return (each - 1, *(each,) * (stages - 2), each - 1)
    most = -(-layers // stages)
    full = layers - (most - 1) * stages
    return (most,) * full + (most - 1,) * (stages - full)
