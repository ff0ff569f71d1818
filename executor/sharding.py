"""fully_shard on a stage: each run of blocks is one group of parameters, the rest is the root's.

It takes no parameter without dimensions (CLIP's logit_scale): those stay whole on every rank.

Given a number as `reshard_after_forward`, fully_shard would make a mesh for each group of its own
ranks alone: where tp or pp is above 1 that mesh has the name of other ranks' in the store, and
each block would have communicators of its own. So all groups get one mesh, made by all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from claw_plan.executor.expert_parallel import HeldExperts
from claw_plan.executor.mesh import Mesh
from claw_plan.executor.stages import Stage
from claw_plan.executor.torch_private import reshard_over
from claw_plan.planner.plan import Plan

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def shard_stage(
    stage: Stage,
    blocks: Sequence[str],
    plan: Plan,
    mesh: Mesh,
    experts: HeldExperts | None = None,
    *,
    lowers: bool,
    finds_unreached: bool,
) -> None:
    """Shards the stage in place; with `lowers` its kernels run in the plan's precision.

    Modules of `experts` are groups of their own, over the ranks that hold the same. With
    `finds_unreached` a rank whose backward left a parameter out reduces zeros for it, so that
    all ranks reduce the same sizes.
    """
    precision = DTYPES[plan.training.precision]
    lowers = lowers and precision is not torch.float32
    policy = MixedPrecisionPolicy(
        param_dtype=precision if lowers else None,
        reduce_dtype=torch.float32 if lowers else None,
    )
    knobs = plan.knobs()
    left_out = {parameter for parameter in stage.parameters() if stays_whole(parameter)}
    if experts is not None:
        # Weights of the experts may be of a higher precision than hidden states.
        own = replace(policy, cast_forward_inputs=False)
        for module in experts.modules.values():
            fully_shard(
                module,
                mesh=experts.data_mesh,
                mp_policy=own,
                reshard_after_forward=knobs.zero == 3,
            )
    for names in batched(blocks, knobs.blocks_per_group):
        modules = [stage.model.get_submodule(name) for name in names]
        fully_shard(
            modules,
            mesh=mesh.data_mesh,
            mp_policy=policy,
            reshard_after_forward=knobs.zero == 3,
            ignored_params=left_out,
        )
        if knobs.reshard_ranks:
            reshard_over(modules[0], mesh.neighbours(knobs.reshard_ranks))
    # The root is needed again at once in backward, so it is never freed between.
    fully_shard(
        stage,
        mesh=mesh.data_mesh,
        mp_policy=policy,
        reshard_after_forward=False,
        ignored_params=left_out,
    )
    if finds_unreached:
        stage.set_reduce_scatter_unused_params(True)  # type: ignore[operator]  # fully_shard's


def batched(blocks: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    """Runs of so many blocks, the last perhaps shorter."""
    return (blocks[start : start + size] for start in range(0, len(blocks), size))


def stays_whole(parameter: nn.Parameter) -> bool:
    """Whether there is no dimension to shard; kernels read such a number in any precision."""
    return parameter.ndim == 0
