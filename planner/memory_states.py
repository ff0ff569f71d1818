"""What a rank holds all the time: parameters, optimizer states, buffers, by its trainer's kind.

Ours, torch's: fp32 parameters, gradients and states, sharded by fully_shard, or whole.
Megatron's (`trainer.keeps_compute_copy`): parameters in the compute precision and gradients in a
buffer of their own, both whole; an fp32 copy and two moments, cut over the ranks of zero=1;
experts over the ranks that hold the same experts (`placement.expert_groups`).
Sources: Rajbhandari et al. 2020 (arXiv 1910.02054); Megatron-Core's DistributedOptimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from claw_plan.planner.averaging import residual_bytes, sends_momentum
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.low_rank import factors_in, is_low_rank
from claw_plan.planner.offload import HOST_STATES
from claw_plan.planner.placement import expert_groups
from claw_plan.planner.problem import OPTIMIZER_STATES, STORED_BYTES, Problem
from claw_plan.planner.schedules import ASYNCHRONOUS
from claw_plan.planner.shards import ShardSizes, local_numel
from claw_plan.planner.zero_one import AWAY_BYTES, is_zero_one

CONTEXT_BYTES = 1_800_000_000
"""What an accelerator holds beside tensors (context, kernels, NCCL buffers). Fitted by the
difference of nvidia-smi readings and allocated tensors on the BigScience runs."""

Parts = dict[str, int]

Spans = Sequence[tuple[int, int]]
"""The units [start, stop) of each stage of a rank."""

COPIED, SHARDED, WHOLE = "copied", "sharded", "whole"


def kind_of(problem: Problem, candidate: Candidate) -> str:
    """How data parallelism keeps parameters; as `lower_zero.make_data_parallel` chooses."""
    if candidate.schedule in ASYNCHRONOUS:
        return WHOLE
    if problem.trainer.keeps_compute_copy and (candidate.zero < 2 or candidate.dp_shard == 1):
        return COPIED
    return SHARDED if candidate.shard_ranks > 1 or problem.training.is_mixed else WHOLE


def held_parts(problem: Problem, shards: ShardSizes, candidate: Candidate, spans: Spans) -> Parts:
    """The parts of a rank's memory that are there at every moment."""
    common = {
        "buffers": problem.graph.buffer_bytes,
        "context": 0 if problem.device.kind == "cpu" else CONTEXT_BYTES,
    }
    if kind_of(problem, candidate) == COPIED:
        return _copied(problem, shards, candidate, spans) | common
    groups = [
        group
        for start, stop in spans
        for group in shards.groups(start, stop, candidate.tp, candidate.shard_ranks).values()
    ]
    shard = sum(group.shard for group in groups)
    trainable = sum(group.trainable_shard for group in groups)
    states = OPTIMIZER_STATES.get(problem.training.optimizer, 0)
    if candidate.offload == "optimizer":  # a CPU is its own host, and holds the copies too
        states = states + HOST_STATES if problem.device.kind == "cpu" else 0
    whole = kind_of(problem, candidate) == WHOLE
    bucketed = whole and candidate.dp_replicate > 1 and candidate.pp == 1
    shard_wise = candidate.dp_replicate == 1 and not whole
    encoded = sum(group.trainable_whole for group in groups) if shard_wise else trainable
    if is_low_rank(candidate):
        residuals = factors_in(candidate, _shapes(shards, spans)).state_bytes()
    else:
        residuals = residual_bytes(problem, candidate, encoded)
    if problem.training.optimizer == "lamb" and sends_momentum(candidate, "lamb"):
        residuals += STORED_BYTES * trainable  # newer second moments beside the frozen ones
    if is_zero_one(candidate):
        residuals += AWAY_BYTES * trainable
    return {
        "parameters": STORED_BYTES * shard,
        "optimizer": STORED_BYTES * states * trainable,
        # DistributedDataParallel copies gradients into its buckets.
        "workspace": STORED_BYTES * trainable if bucketed else 0,
        **({"residuals": residuals} if residuals else {}),
        **_versions(problem, candidate, spans, trainable),
        **common,
    }


def _shapes(shards: ShardSizes, spans: Spans) -> Iterator[tuple[int, ...]]:
    """Of the trained parameters of stages."""
    for span in spans:
        yield from (p.shape for _, p in shards.stage_parameters(*span) if p.trainable)


def version_bytes(problem: Problem) -> int:
    """Of an element of one of the versions that passes use."""
    mixed = problem.training.is_mixed
    return problem.training.compute_bytes if mixed else STORED_BYTES


def _versions(
    problem: Problem, candidate: Candidate, spans: Spans, trainable: int
) -> dict[str, int]:
    """What overlapping steps keep beside parameters and states: a second version of the weights.

    Below fp32 both versions are copies of the parameters. Where an update waits for other stages
    it keeps its gradients so long, while the next step's add up.
    """
    if candidate.schedule not in ASYNCHRONOUS:
        return {}
    copies = 2 if problem.training.is_mixed else 1
    found = {"versions": copies * version_bytes(problem) * trainable}
    if updates_wait(problem, spans):
        found["waiting gradients"] = STORED_BYTES * trainable
    return found


def updates_wait(problem: Problem, spans: Spans) -> bool:
    """Whether a rank's update needs sums over stages: of the norm, or of what it shares."""
    held = {unit for span in spans for unit in range(*span)}
    return problem.training.clip_norm is not None or any(
        parameter.trainable
        and not held.isdisjoint(parameter.units)
        and not held.issuperset(parameter.units)
        for parameter in problem.graph.parameters
    )


def kept_gradient_bytes(problem: Problem, candidate: Candidate) -> int:
    """Of an element of Megatron's gradient buffer; in fp32 where nothing shards the optimizer."""
    return problem.trainer.gradient_bytes if candidate.zero == 1 else STORED_BYTES


def copied_elements(shards: ShardSizes, candidate: Candidate, spans: Spans) -> tuple[int, int]:
    """Trainable elements of a rank: dense ones and experts'."""
    dense = expert = 0
    for start, stop in spans:
        for _, parameter in shards.stage_parameters(start, stop):
            if not parameter.trainable:
                continue
            numel = local_numel(parameter, candidate.tp)
            dense, expert = (
                (dense, expert + numel) if parameter.is_expert else (dense + numel, expert)
            )
    return dense, expert


def owned_elements(
    problem: Problem, shards: ShardSizes, candidate: Candidate, spans: Spans
) -> int:
    """Elements whose optimizer states a rank keeps."""
    dense, expert = copied_elements(shards, candidate, spans)
    if candidate.zero != 1 or candidate.shard_ranks == 1:
        return dense + expert
    replicas = expert_groups(candidate, problem.devices_per_node)[1][0]
    owners = candidate.shard_ranks
    return -(-dense // owners) + -(-expert // min(owners, replicas))


def _copied(problem: Problem, shards: ShardSizes, candidate: Candidate, spans: Spans) -> Parts:
    elements = sum(copied_elements(shards, candidate, spans))
    owned = owned_elements(problem, shards, candidate, spans)
    copies = 1 if problem.training.is_mixed else 0
    states = OPTIMIZER_STATES.get(problem.training.optimizer, 0)
    return {
        "parameters": problem.training.compute_bytes * elements,
        "gradients": kept_gradient_bytes(problem, candidate) * elements,
        "optimizer": STORED_BYTES * (copies + states) * owned,
        "workspace": 0,
    }
