"""The part of an exported script that splits the model: `wrap(model, blocks, mesh)`.

The order is the executor's: tensor parallel, recompute, shards or replicas.
"""

from __future__ import annotations

from collections.abc import Mapping

from claw_plan.planner.plan import Plan
from claw_plan.planner.schedules import schedule_of
from claw_plan.planner.vocabulary_parallel import STYLES


def is_sharded(plan: Plan) -> bool:
    """Whether fully_shard is used: also lower precisions are computed through it."""
    return plan.training.precision != "float32" or plan.knobs().dp_shard > 1


def uses_ddp(plan: Plan) -> bool:
    """Whether DistributedDataParallel averages the gradients of replicas."""
    knobs = plan.knobs()
    return knobs.dp_replicate > 1 and knobs.pp == knobs.tp == 1 and not is_sharded(plan)


def averages(plan: Plan) -> bool:
    """Whether a few lines of the script average the gradients of replicas."""
    return plan.knobs().dp_replicate > 1 and not is_sharded(plan) and not uses_ddp(plan)


def wrapping_text(plan: Plan, styles: Mapping[str, str]) -> str:
    """The function that changes one model, or one stage of it, in place."""
    knobs = plan.knobs()
    parts = []
    if styles:
        parts.append(_tensor_parallel(styles))
        if any(rule.style in STYLES for rule in plan.tensor_parallel):
            parts.append(_WHOLE_VOCABULARY)
    parts.append("    model.to(DEVICE)")
    if knobs.recompute == "full":
        parts.append(_recompute(knobs.recompute_blocks))
    if is_sharded(plan):
        parts.append(_sharding(plan))
    elif uses_ddp(plan):
        parts.append(_replicas(plan))
    parts.append("    return model")
    return _HEAD + "\n".join(parts)


_HEAD = '''
def wrap(model, blocks, mesh):
    """Splits the model as the plan says; `blocks` are its repeated parts."""
'''


def _tensor_parallel(styles: Mapping[str, str]) -> str:
    classes = {"colwise": "ColwiseParallel()", "rowwise": "RowwiseParallel()"}
    lines = "".join(f'        "{name}": {classes[style]},\n' for name, style in styles.items())
    return f"""    # Column-wise linears feed row-wise ones, whose sum over the ranks ends it.
    # Everything else is computed on all tp ranks alike.
    styles = {{
{lines}    }}
    for block in blocks:
        parallelize_module(block, mesh["tp"], styles)"""


_WHOLE_VOCABULARY = """    # `claw-plan run` divides the embedding and the head, too; here
    # every tp rank holds them whole: the same numbers for more memory."""


def _recompute(first: int) -> str:
    some = f"[:{first}]" if first else ""
    why = "    # The first blocks are those whose activations are kept longest.\n" if first else ""
    return f"""{why}    # A block keeps its input only and runs again in backward. The forward is
    # replaced, not the module, so that parameters keep their names.
    for block in blocks{some}:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)"""


def _sharding(plan: Plan) -> str:
    knobs, precision = plan.knobs(), plan.training.precision
    axes = '"dp_replicate", "dp_shard"' if knobs.dp_replicate > 1 else '"dp_shard"'
    policy, lines = "", [f"    data = mesh[{axes}]"]
    if precision != "float32":
        policy = ", mp_policy=policy"
        lines += [
            f"    # Kernels run in {precision}; gradients are summed and weights kept in float32.",
            f"    kernels, sums = torch.{precision}, torch.float32",
            "    policy = MixedPrecisionPolicy(param_dtype=kernels, reduce_dtype=sums)",
        ]
    why = {
        3: "A block's parameters are gathered when it runs and freed behind it (ZeRO-3).",
        2: "Parameters stay gathered for the whole step, gradients are kept in shards (ZeRO-2).",
        1: "Parameters stay gathered and gradients whole for the step (ZeRO-1).",
    }
    reshard: bool | int = knobs.zero == 3
    reason = why[knobs.zero]
    if knobs.reshard_ranks:
        reshard = knobs.reshard_ranks
        reason = f"Between forward and backward {reshard} neighbours keep a block's parameters."
    if knobs.pp > 1 and schedule_of(knobs.schedule).splits_backward:
        # Resharded blocks lose gradients in torch's split backward; see `split_backward`.
        reshard, reason = False, "Parameters stay gathered: split backwards lose gradients else."
    lines += [
        f"    # {reason}",
        *_groups(knobs.blocks_per_group, f"mesh=data{policy}, reshard_after_forward={reshard}"),
        "    # The rest is needed again at once in backward, so it is never freed between.",
        f"    fully_shard(model, mesh=data{policy}, reshard_after_forward=False)",
    ]
    return "\n".join(lines)


def _groups(size: int, how: str) -> list[str]:
    if size == 1:
        return ["    for block in blocks:", f"        fully_shard(block, {how})"]
    return [
        f"    # {size} blocks are gathered and reduced together: fewer, larger messages.",
        f"    for first in range(0, len(blocks), {size}):",
        f"        fully_shard(blocks[first : first + {size}], {how})",
    ]


def _replicas(plan: Plan) -> str:
    bucket_mb = plan.knobs().bucket_bytes / 2**20
    return f"""    # Replicas average their gradients during backward, in buckets.
    model = DistributedDataParallel(
        model,
        process_group=mesh.get_group("dp_replicate"),
        bucket_cap_mb={bucket_mb:g},
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
    )"""
