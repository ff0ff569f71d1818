"""Names the parts of a step for profilers: actions of stages, units, the optimizer's step.

A range is one of torch.profiler, whose traces show it above its operators, and on a GPU one of
NVTX too (ROCTX on ROCm), for Nsight Systems. `name_ranges` gives them to a compiled plan; without
it a model has no hook and opens nothing.

In backward no module is called. The range of a unit begins where the gradient of its output
arrives, and ends where that of its input is complete; what begins ends what is open.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.autograd.graph import get_gradient_edge
from torch.profiler import record_function

from claw_plan.executor.stages import Stage, StandIn
from claw_plan.executor.torch_private import tree_leaves


class Ranges:
    """The ranges of one rank."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._forward: list[AbstractContextManager[None]] = []
        self._backward: tuple[str, int, AbstractContextManager[None]] | None = None
        """The unit whose backward runs, the thread that runs it, and the range."""

    @contextmanager
    def around(
        self, name: str, recording: AbstractContextManager[None] | None = None
    ) -> Iterator[None]:
        """A range of that name; what records the same computation goes inside."""
        with ExitStack() as stack:
            stack.enter_context(record_function(name))
            if self._is_cuda:
                stack.enter_context(torch.cuda.nvtx.range(name))
            if recording is not None:
                stack.enter_context(recording)
            try:
                yield
            finally:
                self._end_backward()

    def name_unit(self, name: str, module: nn.Module) -> None:
        """Ranges around the module's forwards and backwards."""
        # Before and behind what other hooks do, such as gathering parameters.
        module.register_forward_pre_hook(partial(self._before, name), prepend=True)
        module.register_forward_hook(
            partial(self._after, name), with_kwargs=True, always_call=True
        )

    def _before(self, name: str, module: nn.Module, args: Any) -> None:
        self._forward.append(self.around(f"forward {name}"))
        self._forward[-1].__enter__()

    def _after(
        self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any
    ) -> None:
        self._forward.pop().__exit__(None, None, None)
        entry, leave = _differentiable((args, kwargs)), _differentiable(output)
        if entry is None or leave is None:
            return

        def end(gradient: torch.Tensor) -> None:
            self._end_backward(name)
            hook.remove()  # a received buffer is the same tensor in every step

        get_gradient_edge(leave).node.register_prehook(lambda grads: self._begin_backward(name))
        hook = entry.register_hook(end)

    def _begin_backward(self, name: str) -> None:
        self._end_backward()
        one = self.around(f"backward {name}")
        one.__enter__()
        self._backward = (name, threading.get_ident(), one)

    def _end_backward(self, name: str | None = None) -> None:
        """Ends the open range: that of the unit, None for any."""
        if self._backward is None or name not in (None, self._backward[0]):
            return
        _, thread, one = self._backward
        if thread == threading.get_ident():  # else the next to begin there ends it
            self._backward = None
            one.__exit__(None, None, None)


def name_ranges(stages: Sequence[Stage], blocks: Sequence[str], device: torch.device) -> Ranges:
    """Ranges of the blocks that these stages hold, for what else is to be named too."""
    ranges = Ranges(device)
    for stage in stages:
        for block in blocks:
            module = stage.model.get_submodule(block)
            if not isinstance(module, StandIn):
                ranges.name_unit(block, module)
    return ranges


def _differentiable(tree: Any) -> torch.Tensor | None:
    """The first tensor that has a gradient; None where none has."""
    return next(
        (x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.requires_grad), None
    )
