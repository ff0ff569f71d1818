"""Building a model of any size without its memory: parameters as fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn as nn

from claw_plan.planner.errors import TraceError
from claw_plan.planner.model_source import LoadedModel
from claw_plan.planner.torch_private import FakeTensorMode


def build_fake(model: LoadedModel, fake: FakeTensorMode) -> nn.Module:
    """The model with every parameter and buffer fake.

    Some constructors read values (`torch.linspace(0, rate, depth)[i].item()` for stochastic
    depth), which fake tensors have not. These are run on real tensors, each parameter becoming
    fake as soon as a module holds it.
    """
    try:
        with fake:
            return model.build()
    except TraceError as error:
        if error.__cause__ is None:
            raise
    with _fake_on_registration(fake):
        module = model.build()
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = fake.from_tensor(buffer)
    return module


@contextmanager
def _fake_on_registration(fake: FakeTensorMode) -> Iterator[None]:
    register = nn.Module.register_parameter
    known: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # a tie stays one parameter

    def registered(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is None or getattr(param, "fake_mode", None) is fake:
            return
        if id(param) not in known:
            with torch.no_grad():
                made = nn.Parameter(fake.from_tensor(param.data), param.requires_grad)
            known[id(param)] = (param, made)
        self._parameters[name] = known[id(param)][1]

    nn.Module.register_parameter = registered  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
