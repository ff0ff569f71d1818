"""The optimizer's step bucket by bucket, each where the next forward first needs its parameters.

Buckets that arrive in the order in which the next forward needs them (`candidate.bucket_order`)
let it begin before the last has arrived (Jayarajan et al., "Priority-based Parameter Propagation
for Distributed DNN Training", MLSys 2019; Peng et al., "A Generic Communication Scheduler for
Distributed DNN Training Acceleration", SOSP 2019). Nothing is decided at run time: the plan has
the order, and where a parameter is needed is seen in the first step and stays.

    backward, launching buckets | forward of block 0 | forward of block 1 | ...
                                  ^ waits for its buckets and updates its parameters

Updates that look at one parameter alone are the same to the bit in any parts; a bound on the norm
of all gradients needs all of them first, so there is nothing to gain then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn

from claw_plan.executor.communication.reducer import Bucket, Replicas
from claw_plan.executor.torch_private import TorchDispatchMode, tree_leaves

SEPARABLE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.Adamax, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop,
)  # fmt: skip
"""Optimizers that update each parameter by its own gradient and state alone."""


def why_not(optimizer: torch.optim.Optimizer, clip_norm: float | None, *, may_miss: bool) -> str:
    """Why every bucket has to be there before the optimizer's step; '' where it has not."""
    if clip_norm is not None:
        return "clip_norm bounds the norm of all gradients, which needs all of them"
    if type(optimizer) not in SEPARABLE:
        return f"{type(optimizer).__name__} is not known to update each parameter alone"
    if may_miss:
        return "this model's loss may miss parameters, so where they are needed may change"
    return ""


class NextForward:
    """Takes over the buckets of `replicas` after each backward it is asked to.

    `settle` before anybody looks at parameters or states.
    """

    def __init__(self, replicas: Replicas, optimizer: torch.optim.Optimizer) -> None:
        self._replicas, self._optimizer = replicas, optimizer
        self._parts = [_part(optimizer, bucket) for bucket in replicas.buckets]
        self._pending: set[int] = set()
        self._is_placed = False
        replicas.register_forward_hook(lambda *_: self.settle())

    @contextmanager
    def step(self, *, defers: bool) -> Iterator[None]:
        """Around forward and backward; with `defers` their optimizer's step is the next one's."""
        if not defers:
            self.settle()
        self._replicas.leaves_pending = defers
        if self._is_placed:
            yield
        else:
            with _watch_uses(self._replicas) as uses:
                yield
            self._place(uses)
        if defers:
            self._pending = set(range(len(self._parts)))

    @property
    def is_pending(self) -> bool:
        """Whether some bucket of the last step is not waited for yet."""
        return bool(self._pending)

    def settle(self) -> None:
        """Waits for every bucket and updates its parameters."""
        for bucket in self._replicas.buckets:
            self._update(bucket)

    def _place(self, uses: dict[int, nn.Module]) -> None:
        """Buckets to the modules before which each is needed first."""
        needed: dict[nn.Module, list[Bucket]] = {}
        for bucket in self._replicas.buckets:
            for parameter in bucket.parameters:
                module = uses.get(id(parameter))
                if module is not None and bucket not in needed.setdefault(module, []):
                    needed[module].append(bucket)
        for module, buckets in needed.items():
            module.register_forward_pre_hook(self._hook(buckets))
        self._is_placed = True

    def _hook(self, buckets: Sequence[Bucket]) -> Any:
        def update(*_: Any) -> None:
            for bucket in buckets:
                self._update(bucket)

        return update

    def _update(self, bucket: Bucket) -> None:
        if bucket.index not in self._pending:
            return
        self._pending.discard(bucket.index)
        bucket.arrive()
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        try:
            for group, part in zip(groups, self._parts[bucket.index], strict=True):
                group["params"] = part
            self._optimizer.step()
        finally:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters
        for parameter in bucket.parameters:
            parameter.grad = None


def _part(optimizer: torch.optim.Optimizer, bucket: Bucket) -> list[list[nn.Parameter]]:
    """The bucket's parameters in each of the optimizer's groups."""
    own = {id(parameter) for parameter in bucket.parameters}
    return [[p for p in group["params"] if id(p) in own] for group in optimizer.param_groups]


class _Uses(TorchDispatchMode):
    """Sees operators; `found` is the module entered last before each parameter's first."""

    def __init__(self, parameters: Sequence[nn.Parameter], first: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wanted = {id(parameter) for parameter in parameters}
        self.entered = first
        self.found: dict[int, nn.Module] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and id(leaf) in self._wanted:
                self.found.setdefault(id(leaf), self.entered)
        return func(*args, **kwargs)


@contextmanager
def _watch_uses(replicas: Replicas) -> Iterator[dict[int, nn.Module]]:
    """Where each parameter is used first, once the block has run."""
    parameters = [p for bucket in replicas.buckets for p in bucket.parameters]
    uses = _Uses(parameters, replicas.module)

    def entered(module: nn.Module, *_: Any) -> None:
        uses.entered = module

    handles = [module.register_forward_pre_hook(entered) for module in replicas.module.modules()]
    try:
        with uses:
            yield uses.found
    finally:
        for handle in handles:
            handle.remove()
