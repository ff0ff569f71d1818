"""Recompute: blocks that keep less for the backward pass and run again what they did not keep.

'full' keeps a block's input alone. 'half' also keeps the results of attention and of every other
product with weights, so that about half of a forward runs again: torchtitan's selective policy
(torchtitan/distributed/activation_checkpoint.py), by torch's selective checkpoint contexts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch.nn as nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from claw_plan.executor.batch_norm import WithoutStatistics
from claw_plan.executor.double_mode import DoubleMode
from claw_plan.executor.torch_private import OpOverload
from claw_plan.executor.whole_model import AS_PLANNED, DOUBLE

PRODUCTS = ("mm", "addmm")
ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Around a block's forward, and around the part of it that runs again."""


def recompute(block: nn.Module, mode: str, precision: str = AS_PLANNED) -> None:
    """Makes the block forget, in place, so that its parameters keep their names.

    `mode` is 'full' or 'half'. The engine that runs the block again in backward knows nothing of
    a DoubleMode around the step.
    """
    block.forward = partial(
        checkpoint,
        block.forward,
        use_reentrant=False,
        context_fn=partial(_contexts, block, mode, precision),
    )


def _contexts(block: nn.Module, mode: str, precision: str) -> Contexts:
    first: AbstractContextManager[Any] = nullcontext()
    again: AbstractContextManager[Any] = nullcontext()
    if mode == "half":
        first, again = create_selective_checkpoint_contexts(half_policy())
    double = DoubleMode() if precision == DOUBLE else nullcontext()
    return first, _all_of(double, WithoutStatistics(block), again)


@contextmanager
def _all_of(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def half_policy() -> Callable[..., CheckpointPolicy]:
    """Which results of one forward are kept; the counts of both runs must agree."""
    products: Counter[bool] = Counter()

    def policy(
        context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        name = operator.overloadpacket.__name__ if _is_aten(operator) else ""
        keeps = name in ATTENTION
        if name in PRODUCTS:
            products[context.is_recompute] += 1
            keeps = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _is_aten(operator: Any) -> bool:
    return isinstance(operator, OpOverload) and operator.namespace == "aten"
