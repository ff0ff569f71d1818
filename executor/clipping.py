"""Clipping by the norm that one process would see, whatever the gradients are divided over.

Each rank adds the squares of what it holds and no earlier rank holds too: shards and divided
weights count where they lie, copies (of replicas, tensor-parallel ranks, tied stages) once. One
sum over all ranks then gives every rank the same norm. Clipping follows torch's
`clip_grad_norm_`: gradients times min(1, max_norm / (norm + 1e-6)).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from claw_plan.executor.expert_parallel import ExpertParallel
from claw_plan.executor.gradients import TiedGradients, local
from claw_plan.executor.mesh import Mesh

MARGIN = 1e-6
"""What torch's clip_grad_norm_ adds to the norm before it divides."""


def counted_here(
    parameters: Mapping[str, nn.Parameter],
    mesh: Mesh,
    is_divided: Callable[[str], bool],
    tied: TiedGradients | None,
    experts: ExpertParallel | None = None,
) -> list[nn.Parameter]:
    """The trained parameters whose part on this rank no other rank counts.

    `is_divided` says whether tensor parallelism gives each rank another part of that name.
    """
    counted = []
    for name, parameter in parameters.items():
        copied_over = {"dp_replicate"}
        if not isinstance(parameter, DTensor):
            copied_over |= set(mesh.state_axes) - {"dp_replicate"}
        shared = experts if experts is not None and name in experts.parameters else None
        if shared is not None:
            copied_over = set()
        if not is_divided(name):
            copied_over.add("tp")
        is_first = all(mesh.index(axis) == 0 for axis in copied_over)
        is_first = is_first and (shared is None or shared.counts_here())
        is_first = is_first and (tied is None or tied.is_first_holder(name))
        if parameter.requires_grad and is_first:
            counted.append(parameter)
    return counted


def global_norm(counted: Sequence[nn.Parameter], device: torch.device) -> torch.Tensor:
    """The Euclidean norm of all gradients of the model; every rank must call it."""
    return begin_norm(counted, device)()


def begin_norm(
    counted: Sequence[nn.Parameter], device: torch.device
) -> Callable[[], torch.Tensor]:
    """Begins the sum over all ranks; the call waits for it, and answers with the norm.

    Gradients are squared in their own precision and added in fp64, which no order of ranks
    changes visibly.
    """
    gradients = [local(p.grad) for p in counted if p.grad is not None]
    squares = torch.zeros((), dtype=torch.float64, device=device)
    if gradients:
        norms = torch.stack([norm.to(device) for norm in torch._foreach_norm(gradients)])
        squares += norms.double().square().sum()
    work = dist.all_reduce(squares, async_op=True)
    assert work is not None

    def norm() -> torch.Tensor:
        work.wait()
        return squares.sqrt()

    return norm


def clip(parameters: Sequence[nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scales the gradients in place so that their global norm is at most `max_norm`."""
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        factor = (max_norm / (norm + MARGIN)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
