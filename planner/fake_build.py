"""Building a model of any size without its memory: parameters as fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn

from claw_plan.planner.errors import TraceError
from claw_plan.planner.model_source import LoadedModel
from claw_plan.planner.torch_private import FakeTensorMode, without_rejection

REAL_LIMIT_BYTES = 2 * 2**30
"""Models that fake tensors cannot build or run are so for real, up to this size of parameters."""

_INITIALISERS = (
    "constant_", "kaiming_normal_", "kaiming_uniform_", "normal_", "ones_", "trunc_normal_",
    "uniform_", "xavier_normal_", "xavier_uniform_", "zeros_",
)  # fmt: skip
"""Half the time of building a GPT of 96 blocks."""

Changed = Callable[[nn.Parameter], nn.Parameter]
"""What a module holds in place of a parameter that it is given."""


def build_fake(model: LoadedModel, fake: FakeTensorMode) -> nn.Module:
    """The model with every parameter and buffer fake.

    Some constructors read values (`torch.linspace(0, rate, depth)[i].item()` for stochastic
    depth), which fake tensors have not. These are run on real tensors, each parameter becoming
    fake as soon as a module holds it. Those that read parameters too are run for real, within
    `REAL_LIMIT_BYTES`.
    """
    with without_rejection():
        try:
            with fake, _uninitialised():
                return model.build()
        except TraceError as error:
            if error.__cause__ is None:
                raise
        try:
            with on_registration(Faked(fake)):
                module = model.build()
        except TraceError:
            with on_registration(_Limited(model)):
                module = model.build()
            with on_registration(Faked(fake)):
                for part in module.modules():
                    for name, parameter in part._parameters.items():
                        part.register_parameter(name, parameter)
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = fake.from_tensor(buffer)
    return module


@contextmanager
def _uninitialised() -> Iterator[None]:
    """Inside, what `torch.nn.init` does to parameters is left out: fake ones have no values."""
    before = {name: getattr(nn.init, name) for name in _INITIALISERS}
    for name in before:
        setattr(nn.init, name, _left_alone)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(nn.init, name, function)


def _left_alone(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor


class Faked:
    """A fake parameter for each real one; a tie stays one parameter."""

    def __init__(self, fake: FakeTensorMode) -> None:
        self._fake = fake
        self._known: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def __call__(self, parameter: nn.Parameter) -> nn.Parameter:
        """The fake one of this parameter, made when it is first asked for."""
        if getattr(parameter, "fake_mode", None) is self._fake:
            return parameter
        if id(parameter) not in self._known:
            with torch.no_grad():
                data = self._fake.from_tensor(parameter.data)
            made = nn.Parameter(data, parameter.requires_grad)
            self._known[id(parameter)] = (parameter, made)
        return self._known[id(parameter)][1]


class _Limited:
    """The parameter itself, as long as all of them are not too large."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._sizes: dict[int, int] = {}

    def __call__(self, parameter: nn.Parameter) -> nn.Parameter:
        self._sizes[id(parameter)] = parameter.numel() * parameter.element_size()
        if sum(self._sizes.values()) > REAL_LIMIT_BYTES:
            raise TraceError(
                f"{self._model.path}: building the model reads the values of its parameters, and "
                f"with more than {REAL_LIMIT_BYTES / 2**30:.0f} GiB of them it is too large to be "
                "built for real; give a smaller configuration of it"
            )
        return parameter


@contextmanager
def on_registration(changed: Changed) -> Iterator[None]:
    """Inside, modules keep what `changed` makes of each parameter that they register."""
    register = nn.Module.register_parameter

    def registered(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None:
            self._parameters[name] = changed(param)

    nn.Module.register_parameter = registered  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def check_size(model: LoadedModel, cause: TraceError) -> None:
    """Raises `cause` for models too large to be run for real only to be traced."""
    module = build_fake(model, FakeTensorMode(allow_non_fake_inputs=True))
    size = sum(p.numel() * 4 for p in module.parameters())
    if size > REAL_LIMIT_BYTES:
        raise TraceError(
            f"{cause}; its values decide how it goes on, and with {size / 2**30:.0f} GiB of "
            "parameters it is too large to be traced on real tensors; give a smaller "
            "configuration of it"
        ) from cause
