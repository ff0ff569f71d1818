"""Which parameters the loss reaches, asked before training.

Data parallelism waits for a gradient of every trained parameter. One that gets none (a head that
this loss does not use, an expert without tokens, the other side of a branch) would stop
DistributedDataParallel, and make fully_shard reduce other sizes on other ranks. Both can be told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn as nn

from claw_plan.executor.gradients import local
from claw_plan.executor.recording import unchanged
from claw_plan.executor.torch_private import fake_mode
from claw_plan.planner.autograd_graph import is_leaf, nodes_of

Run = Callable[[nn.Module], torch.Tensor]
"""Calls the module on its inputs and answers with the loss."""


def unreached(model: nn.Module, run: Run) -> frozenset[str]:
    """First names of trained parameters that `run`'s loss does not reach.

    All of them where the model looks at values: then which it reaches is up to the batch.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with unchanged(model), torch.random.fork_rng(devices=[]):
        try:
            with fake_mode():
                loss = run(model)
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
            # What models raise that look at values, which fake tensors do not have.
            return frozenset(trained)
    reached = {id(node.variable) for node in nodes_of(loss.grad_fn) if is_leaf(node)}
    return frozenset(name for name, parameter in trained.items() if id(parameter) not in reached)


def leave_unreached(
    parameters: Sequence[nn.Parameter], groups: Sequence[dist.ProcessGroup]
) -> None:
    """Takes away gradients that are zero on every rank, which sharding made of none at all.

    An optimizer leaves a parameter without gradient as it is, but lets one of zeros decay.
    """
    given = [parameter for parameter in parameters if parameter.grad is not None]
    if not given:
        return
    flags = torch.stack([local(p.grad).count_nonzero() for p in given])  # type: ignore[arg-type]
    for group in groups:
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    for parameter, flag in zip(given, flags.tolist(), strict=True):
        if not flag:
            parameter.grad = None
