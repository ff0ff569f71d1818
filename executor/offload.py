"""An optimizer whose states and arithmetic are the host's.

Device memory then holds parameters and gradients alone. Source: Ren et al. 2021, "ZeRO-Offload"
(arXiv 2101.06840), without its one-step delay, which would change the training. A step takes this
rank's own part of parameters and gradients to the host and the new parameters back, so every way
of dividing is offloaded alike. The device's parameters are the only ones that count between steps:
whoever sets them, as reading a checkpoint does, need not know of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn

from claw_plan.executor.gradients import local

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


class HostOptimizer(torch.optim.Optimizer):
    """Steps on the host with what `make` makes of the host's copies.

    It is used like the optimizer inside: `param_groups` hold the device's parameters and the
    inner settings, which schedulers may change, and `state` the inner states, on the host. `inner`
    is what steps there.
    """

    def __init__(self, make: MakeOptimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._pairs = [(parameter, _host_copy(parameter)) for parameter in parameters]
        self.inner = make([host for _, host in self._pairs])
        on_device = {id(host): parameter for parameter, host in self._pairs}
        groups = [
            group | {"params": [on_device[id(host)] for host in group["params"]]}
            for group in self.inner.param_groups
        ]
        super().__init__(groups, self.inner.defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Gradients to the host, the step there, parameters back."""
        assert closure is None, "gradients are complete before the step"
        for parameter, host in self._pairs:
            host.data.copy_(local(parameter.data), non_blocking=True)
            _bring_gradient(parameter, host)
            if parameter in self.state:
                self.inner.state[host] = self.state[parameter]
        _wait_for_copies()
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({key: value for key, value in group.items() if key != "params"})
        self.inner.step()
        for parameter, host in self._pairs:
            local(parameter.data).copy_(host, non_blocking=True)
            if host in self.inner.state:
                self.state[parameter] = self.inner.state[host]
        _wait_for_copies()


def _host_copy(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(_pinned(torch.empty_like(local(parameter.detach()), device="cpu")))


def _pinned(values: torch.Tensor) -> torch.Tensor:
    """Memory that an accelerator can copy to and from beside its computation."""
    return values.pin_memory() if torch.accelerator.is_available() else values


def _bring_gradient(parameter: nn.Parameter, host: nn.Parameter) -> None:
    if parameter.grad is None:
        host.grad = None
        return
    if host.grad is None:
        host.grad = _pinned(torch.empty_like(host))
    host.grad.copy_(local(parameter.grad), non_blocking=True)


def _wait_for_copies() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
