"""Gradients of replicas in buckets of given boundaries become their means, during backward.

DistributedDataParallel fills its buckets to a size and lays them out anew after the first step;
here the plan says which parameters share one. Buckets leave in one order on every rank, each once
its gradients and all buckets before it are complete: no rank decides anything at run time. A
bucket's gradients lie in one flat buffer, of which `parameter.grad` are views. Who says so
(`leaves_pending`) waits for each bucket where it is needed, as `executor.next_forward` does.

With the backend's own all-reduce the arithmetic is that of DistributedDataParallel: gradients are
multiplied by 1/n, then summed. Any other mean (`Mean`) blocks, so on a CPU it runs on a thread
beside the backward; a GPU's kernels and messages are only queued where it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.torch_private import after_backward

Mean = Callable[[int, Tensor], Tensor]
"""(Number of the bucket, its gradients on this rank) to their mean over all ranks, blocking. It
may use up what it is given; its calls come one after the other, in the same order everywhere."""


class _Arriving(Protocol):
    """A mean that is on its way."""

    def wait(self) -> object: ...


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients travel together, and the buffer they lie in."""

    index: int
    parameters: Sequence[nn.Parameter]
    buffer: Tensor
    views: Sequence[Tensor]
    seen: set[int] = field(default_factory=set)
    arriving: _Arriving | None = None

    def arrive(self) -> None:
        """Waits for its mean if that is on its way."""
        if self.arriving is not None:
            self.arriving.wait()
        self.arriving = None


class Replicas(nn.Module):
    """A module whose replicas on the ranks of `group` end each backward with equal gradients.

    `sizes` are numbers of trained parameters, from the module's last to its first; buckets leave
    in that order, or as `order` says by their numbers. What a backward does not reach counts as
    zeros where `may_miss` says that it may be missed, and is refused
    where not. Without a `mean` it is the backend's own. Backwards under `no_sync` add up what the
    next one outside it sends.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        sizes: Sequence[int],
        *,
        may_miss: bool = False,
        mean: Mean | None = None,
        order: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.module, self.group = module, group
        self._may_miss, self._mean = may_miss, mean
        self.leaves_pending = False
        self.buckets = make_buckets(module, sizes)
        self._order = [self.buckets[number] for number in order or range(len(self.buckets))]
        blocks = mean is not None and self.buckets[0].buffer.device.type == "cpu"
        self._thread = ThreadPoolExecutor(1, "mean of gradients") if blocks else None
        self._names = {id(p): name for name, p in module.named_parameters()}
        self._syncs, self._began, self._left = True, False, 0
        for bucket in self.buckets:
            for place, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._hook(bucket, place))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """That of the module."""
        if torch.is_grad_enabled() and (self._began or not self.leaves_pending):
            self._begin_anew()  # a backward that was given up may have left something behind
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside add to gradients, and send nothing."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def _hook(self, bucket: Bucket, place: int) -> Callable[[Tensor], None]:
        def complete(parameter: Tensor) -> None:
            if not self._syncs:
                return
            if not self._began:
                self._began = True
                after_backward(self._finish)
            self._take(bucket, place)
            self._launch_what_is_complete()

        return complete

    def _take(self, bucket: Bucket, place: int) -> None:
        """Moves a gradient into the buffer; that of a parameter nothing reached is zero."""
        if place in bucket.seen:
            raise ExecutionError(
                f"{self._name(bucket, place)} got its gradient twice in one backward; recompute "
                "with use_reentrant=False, or plan without buckets"
            )
        bucket.seen.add(place)
        view, gradient = bucket.views[place], bucket.parameters[place].grad
        with torch.no_grad():
            if gradient is None:
                view.zero_()
            elif self._mean is None:
                torch.mul(gradient, 1.0 / self.group.size(), out=view)
            elif gradient is not view:
                view.copy_(gradient)
        bucket.parameters[place].grad = view

    def _launch_what_is_complete(self) -> None:
        while self._left < len(self.buckets):
            bucket = self._order[self._left]
            if len(bucket.seen) < len(bucket.views):
                return
            self._left += 1
            if self._mean is None:
                bucket.arriving = dist.all_reduce(bucket.buffer, group=self.group, async_op=True)
            elif self._thread is not None:
                bucket.arriving = _Submitted(self._thread, self._mean_of, bucket)
            else:
                self._mean_of(bucket)

    def _mean_of(self, bucket: Bucket) -> None:
        assert self._mean is not None
        with torch.no_grad():
            mean = self._mean(bucket.index, bucket.buffer)
            if mean is not bucket.buffer:
                bucket.buffer.copy_(mean)

    def _finish(self) -> None:
        """Sends what no gradient came for, and waits for all that is on its way."""
        for bucket in self.buckets:
            for place in range(len(bucket.views)):
                if place not in bucket.seen:
                    self._check_miss(bucket, place)
                    self._take(bucket, place)
        self._launch_what_is_complete()
        self._begin_anew()

    def _check_miss(self, bucket: Bucket, place: int) -> None:
        if not self._may_miss and bucket.parameters[place].grad is None:
            raise ExecutionError(
                f"this backward reached no gradient of {self._name(bucket, place)}, which the "
                "planned model's loss does; its replicas would wait for it"
            )

    def _begin_anew(self) -> None:
        """Forgets the backward; waits for all that is on its way, unless somebody else does."""
        self._began, self._left = False, 0
        for bucket in self.buckets:
            if not self.leaves_pending:
                bucket.arrive()
            bucket.seen.clear()

    def _name(self, bucket: Bucket, place: int) -> str:
        return self._names[id(bucket.parameters[place])]


class _Submitted:
    """A call that runs on a thread, after those given to it before."""

    def __init__(
        self, thread: ThreadPoolExecutor, call: Callable[[Bucket], None], bucket: Bucket
    ) -> None:
        self._future = thread.submit(call, bucket)

    def wait(self) -> None:
        """Until it is done; raises what it raised."""
        self._future.result()


def make_buckets(module: nn.Module, sizes: Sequence[int]) -> list[Bucket]:
    """The module's trained parameters, last to first, in buckets of so many."""
    trained = [p for p in module.parameters() if p.requires_grad][::-1]
    if sum(sizes) != len(trained) or min(sizes, default=0) < 1:
        raise ExecutionError(
            f"buckets hold the module's {len(trained)} trained parameters once each, but "
            f"{[*sizes]} hold {sum(sizes)}; plan again"
        )
    remaining = iter(trained)
    held = [[next(remaining) for _ in range(size)] for size in sizes]
    return [_bucket(index, parameters) for index, parameters in enumerate(held)]


def _bucket(index: int, parameters: Sequence[nn.Parameter]) -> Bucket:
    kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
    if len(kinds) > 1:
        said = " and ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ExecutionError(
            f"gradients of one bucket have one dtype and device, but bucket {index} has {said}; "
            "plan without buckets"
        )
    first = parameters[0]
    edges = [0]
    for parameter in parameters:
        edges.append(edges[-1] + parameter.numel())
    buffer = torch.zeros(edges[-1], dtype=first.dtype, device=first.device)
    views = [
        buffer[start:stop].view(parameter.shape)
        for (start, stop), parameter in zip(pairwise(edges), parameters, strict=True)
    ]
    return Bucket(index, parameters, buffer, views)
