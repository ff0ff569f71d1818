"""The plan's tensor-parallel rules applied to this rank's blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn as nn

from claw_plan.executor.mesh import Mesh
from claw_plan.planner.plan import Plan


@dataclass(kw_only=True)
class TensorParallel:
    """What was divided. `sequence_names` are parameters whose gradients need a sum over tp."""

    sequence_names: tuple[str, ...] = ()


def divide_weights(plan: Plan, model: nn.Module, blocks: list[str], mesh: Mesh) -> TensorParallel:
    """Divides the weights of the blocks in place."""
    raise NotImplementedError
