"""Two versions of a rank's weights, for steps that overlap: the newest and the one before.

An optimizer changes weights in place, but microbatches in flight must find theirs unchanged in
backward. So each parameter has two storages, which take turns: an update copies the newest
version over the older one, which nothing in flight uses any more, and the optimizer changes it
there. Optimizer states and gradients are there once (Narayanan et al. 2021, arXiv 2006.09503,
section 3.1). The parameters stay the objects they are; they are pointed to the version that the
coming pass uses, and between passes at the newest.

Below fp32 the optimizer keeps its fp32 weights, and the two versions are copies of them in the
precision of the kernels; gradients of microbatches add up in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from claw_plan.executor.torch_private import keeping_versions, tree_map
from claw_plan.planner.asynchronous import version_of

Storages = list[torch.Tensor]
Gradient = torch.Tensor | None
"""None where nothing has reached the parameter."""


class WeightVersions:
    """The versions of `parameters`, which the optimizer trains.

    `updates` counts the changes so far: the newest version is W(updates). `lowered` is the
    precision of the kernels, None where it is that of the parameters.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], lowered: torch.dtype | None = None
    ) -> None:
        self.parameters, self._lowers = parameters, lowered is not None
        self.updates = 0
        self._trained: Storages = [parameter.data for parameter in parameters]
        self._newest = [_lowered(p, lowered) for p in self._trained]
        self._before = [weights.clone() for weights in self._newest]
        self._at = self._trained
        self._sums: list[Gradient] = [None] * len(parameters)
        for place, parameter in enumerate(parameters if lowered else ()):
            parameter.register_post_accumulate_grad_hook(partial(self._add_up, place))

    def _add_up(self, place: int, parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None, "the hook runs once it is there"
        held = self._sums[place]
        if held is None:
            self._sums[place] = gradient.to(self._trained[place].dtype)
        else:
            held.add_(gradient)

    def use(self, step: int) -> None:
        """Points the parameters at the version that microbatches of a step use."""
        wanted = version_of(step)
        assert self.updates - 1 <= wanted <= self.updates, f"{wanted=} {self.updates=}"
        self._point_at(self._newest if wanted == self.updates else self._before)

    def take_gradients(self) -> list[Gradient]:
        """What the microbatches of a step have added up; the next step begins at nothing."""
        if self._lowers:
            taken, self._sums = self._sums, [None] * len(self.parameters)
            return taken
        return self.take_shown()

    def give_gradients(self, gradients: list[Gradient]) -> None:
        """Lets microbatches go on adding to these."""
        if self._lowers:
            self._sums = gradients
            return
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def take_shown(self) -> list[Gradient]:
        """The gradients that the parameters show, which then show none."""
        shown = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return shown

    def show(self, gradients: Sequence[Gradient]) -> None:
        """The newest weights, and these as their gradients."""
        self._point_at(self._trained)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    @torch.no_grad()
    def update(self, step: Callable[[], object]) -> None:
        """Makes the next version: `step` changes parameters by the gradients that they show."""
        for newest, before in zip(self._newest, self._before, strict=True):
            before.copy_(newest)
        self._newest, self._before = self._before, self._newest
        if not self._lowers:
            self._trained = self._newest
        self._point_at(self._trained)
        # What is in flight has saved the parameters, whose other storage stays as it is.
        with keeping_versions(self.parameters):
            step()
        if self._lowers:
            for newest, trained in zip(self._newest, self._trained, strict=True):
                newest.copy_(trained)
        self.updates += 1
        self.take_shown()

    @property
    def before(self) -> Storages:
        """The version before the newest."""
        return self._before

    def show_newest(self) -> None:
        """Points the parameters at the newest version, for whoever looks at them from outside."""
        self._point_at(self._trained)

    @torch.no_grad()
    def take_newest(self, *, before_too: bool) -> None:
        """What was written to the parameters from outside is the newest version from now on."""
        assert self._at is self._trained, "parameters are read in between passes"
        for newest, before, trained in zip(self._newest, self._before, self._trained, strict=True):
            newest.copy_(trained)
            if before_too:
                before.copy_(trained)

    def _point_at(self, storages: Storages) -> None:
        if storages is self._at:
            return
        self._at = storages
        for parameter, storage in zip(self.parameters, storages, strict=True):
            parameter.data = storage


def _lowered(weights: torch.Tensor, precision: torch.dtype | None) -> torch.Tensor:
    """A copy in another precision; as fully_shard has it, none of a single number."""
    if precision is None:
        return weights
    return weights.to(precision) if weights.ndim else weights.clone()


def lower_inputs(modules: Iterable[nn.Module], precision: torch.dtype) -> None:
    """Floating-point arguments of these modules come in the precision of their weights."""

    def cast(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(precision) if is_float else value

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(cast, args), tree_map(cast, kwargs)

    for module in modules:
        module.register_forward_pre_hook(before, with_kwargs=True)
