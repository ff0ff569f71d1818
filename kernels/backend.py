"""Which implementation of the primitive passes serves a tensor: by its device."""

from __future__ import annotations

from functools import cache
from typing import Protocol

from torch import Tensor

from claw_plan.kernels import compiled, reference


class Backend(Protocol):
    """The primitive passes; reference.py defines what each does."""

    def mean_abs(self, x: Tensor) -> Tensor: ...  # noqa: D102
    def root_mean_square(self, x: Tensor) -> Tensor: ...  # noqa: D102
    def pack_signs(self, x: Tensor, out: Tensor) -> None: ...  # noqa: D102
    def unpack_signs(self, codes: Tensor, scale: Tensor, out: Tensor) -> None: ...  # noqa: D102


def backend_of(tensor: Tensor) -> Backend:
    """The fastest that there is for where the tensor lies."""
    return _backend(tensor.device.type)


@cache
def _backend(device_type: str) -> Backend:
    if device_type == "cpu":
        return compiled
    return reference
