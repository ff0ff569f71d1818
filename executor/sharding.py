"""fully_shard on a stage: each block's parameters are one group, the rest is the root's.

It takes no parameter without dimensions (CLIP's logit_scale): those stay whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from claw_plan.executor.mesh import Mesh
from claw_plan.executor.stages import Stage
from claw_plan.planner.plan import Plan

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def shard_stage(
    stage: Stage,
    blocks: Sequence[str],
    plan: Plan,
    mesh: Mesh,
    *,
    lowers: bool,
    finds_unreached: bool,
) -> None:
    """Shards the stage in place; with `lowers` its kernels run in the plan's precision.

    With `finds_unreached` a rank whose backward left a parameter out reduces zeros for it, so that
    all ranks reduce the same sizes.
    """
    precision = DTYPES[plan.training.precision]
    lowers = lowers and precision is not torch.float32
    policy = MixedPrecisionPolicy(
        param_dtype=precision if lowers else None,
        reduce_dtype=torch.float32 if lowers else None,
    )
    reshard = plan.knobs().zero == 3
    left_out = {parameter for parameter in stage.parameters() if stays_whole(parameter)}
    for name in blocks:
        fully_shard(
            stage.model.get_submodule(name),
            mesh=mesh.data_mesh,
            mp_policy=policy,
            reshard_after_forward=reshard,
            ignored_params=left_out,
        )
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


def stays_whole(parameter: nn.Parameter) -> bool:
    """Whether there is no dimension to shard; kernels read such a number in any precision."""
    return parameter.ndim == 0
