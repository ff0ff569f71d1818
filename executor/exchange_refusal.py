"""Plans whose codec, algorithm or run's options have nothing to act on: refused before any rank.

What the search may offer is in `planner.supported`; a plan that was edited comes here.
"""

from __future__ import annotations

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.replica_exchange import (
    AS_PLANNED,
    AUTO,
    UNCODED,
    ExchangeOptions,
    needs_exchange,
    sends_momentum,
)
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.model_source import LoadedModel
from claw_plan.planner.plan import Plan
from claw_plan.planner.schedules import ASYNCHRONOUS
from claw_plan.planner.supported import OF_MOMENTUM
from claw_plan.profiles.codecs import LOW_RANK, ZERO_ONE, describe_codec


def refuse_exchange(
    plan: Plan, loaded: LoadedModel, options: ExchangeOptions = AS_PLANNED
) -> None:
    """Raises ExecutionError where codec, algorithm or the run's options have nothing to act on."""
    knobs = plan.knobs()
    if not needs_exchange(knobs) and not options:
        return
    if options or knobs.collective != AUTO:
        _refuse_whole(plan, options)
    name = describe_codec(knobs.codec).name
    if name in OF_MOMENTUM:
        _refuse_momentum(plan, loaded)
    elif name == LOW_RANK:
        _refuse_low_rank(plan)
    elif knobs.codec != UNCODED:
        _refuse_encoded(plan)


def _refuse_whole(plan: Plan, options: ExchangeOptions) -> None:
    """Of other algorithms, selection and checks."""
    knobs = plan.knobs()
    asked, without = f"collective={knobs.collective}", "collective=auto"
    if options:
        asked, without = options.asked(), f"leave {options.asked()} out"
    if options.selector is not None:
        _refuse_selection(knobs)
    _refuse_shards(plan, asked, without)
    if knobs.pp > 1 or knobs.dp_replicate == 1 or (knobs.tp > 1 and knobs.codec != UNCODED):
        raise ExecutionError(
            f"{asked}: it acts where replicas alone meet; use pp=1, tp=1 and dp_replicate above "
            f"1, or {without}"
        )


def _refuse_selection(knobs: Candidate) -> None:
    """Of algorithms that change what a codec is given, or that nobody has timed with one."""
    if knobs.codec != UNCODED and knobs.collective == "hierarchical":
        raise ExecutionError(
            "--selector: with collective=hierarchical ranks encode parts of their node's sums, "
            "and what was not sent of those belongs to no other algorithm; leave --selector out, "
            "or use collective=auto"
        )
    if describe_codec(knobs.codec).name in (LOW_RANK, ZERO_ONE):
        raise ExecutionError(
            f"--selector: it times means of equal buckets, but codec={knobs.codec} sends others "
            "from step to step, or several for one; leave --selector out, or use codec=none"
        )


def _refuse_momentum(plan: Plan, loaded: LoadedModel) -> None:
    """Of codecs that carry AdamW's momentum, or gradients under another optimizer."""
    knobs = plan.knobs()
    asked, of_momentum = f"codec={knobs.codec}", sends_momentum(plan, loaded)
    if describe_codec(knobs.codec).name == ZERO_ONE:
        _refuse_moves(asked, knobs, is_adamw=of_momentum and plan.training.optimizer == "adamw")
    _refuse_shards(plan, asked, "codec=int8")
    if knobs.pp > 1 or knobs.dp_replicate == 1:
        raise ExecutionError(
            f"{asked}: it acts where whole replicas meet; use pp=1 and dp_replicate above 1, or "
            "codec=int8"
        )
    if describe_codec(knobs.codec).momentum and (of_momentum or loaded.optimizer is not None):
        raise ExecutionError(
            f"{asked}: it keeps the momentum of plain SGD on each rank, but the plan trains with "
            "another optimizer; use optimizer: sgd and none in the model's file, or leave the "
            "codec's momentum out"
        )
    if of_momentum and knobs.offload != "none":
        raise ExecutionError(
            f"{asked}: the momentum that travels lies on the host with offload={knobs.offload}; "
            "use offload=none, or codec=int8"
        )
    if of_momentum and plan.training.clip_norm is not None:
        raise ExecutionError(
            f"{asked}: after its warm-up no rank has the mean gradient whose norm clip_norm "
            "bounds; leave clip_norm out, or use codec=int8"
        )


def _refuse_moves(asked: str, knobs: Candidate, *, is_adamw: bool) -> None:
    """Of 0/1 Adam, which is an optimizer of its own."""
    if not is_adamw:
        raise ExecutionError(
            f"{asked}: it sends what AdamW moves, but the plan trains with another optimizer; use "
            "optimizer: adamw and none in the model's file, or codec=int8"
        )
    if knobs.tp > 1:
        raise ExecutionError(f"{asked} is not proven with tensor parallelism; use tp=1")


def _refuse_low_rank(plan: Plan) -> None:
    """Of PowerSGD, which needs the matrices as they are."""
    knobs = plan.knobs()
    asked = f"codec={knobs.codec}"
    _refuse_shards(plan, asked, "codec=int8")
    if knobs.pp > 1 or knobs.dp_replicate == 1 or knobs.tp > 1:
        raise ExecutionError(
            f"{asked}: it acts where replicas alone meet; use pp=1, tp=1 and dp_replicate above "
            "1, or codec=int8"
        )


def _refuse_shards(plan: Plan, asked: str, without: str) -> None:
    shards = plan.knobs().shard_ranks > 1
    if shards or plan.training.precision != "float32":
        where = "of shards" if shards else f"in precision {plan.training.precision}"
        instead = "dp_replicate in place of dp_shard and cp" if shards else "--precision fp32"
        raise ExecutionError(
            f"{asked}: fully_shard reduces gradients {where} itself; use {instead}, or {without}"
        )


def _refuse_encoded(plan: Plan) -> None:
    """Of codecs that carry gradients."""
    knobs = plan.knobs()
    asked = f"codec={knobs.codec}"
    if knobs.dp_replicate == 1 and knobs.shard_ranks == 1:
        raise ExecutionError(
            f"{asked}: it acts where gradients are averaged; use dp_replicate, dp_shard or cp "
            "above 1, or codec=none"
        )
    if plan.training.precision == "float16":
        raise ExecutionError(
            f"{asked}: what it has not sent would be in units of a loss scale that moves; use "
            "--precision bf16 or fp32, or codec=none"
        )
    if knobs.ep > 1:
        raise ExecutionError(
            f"{asked}: experts are averaged over fewer ranks than all else, which no codec does; "
            "use ep=1, or codec=none"
        )
    if plan.schedule.name in ASYNCHRONOUS:
        raise ExecutionError(
            f"{asked}: schedule={plan.schedule.name} averages gradients of steps that overlap; "
            "use another schedule, or codec=none"
        )
    if knobs.offload != "none" and not knobs.reduces_in_backward:
        raise ExecutionError(
            f"{asked} is not proven with offload={knobs.offload} where shards or stages meet; "
            "use offload=none, or codec=none"
        )
