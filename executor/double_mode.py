"""fp64 all the way: casts to fp32 that a model's own code asks for are left out."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class DoubleMode(TorchFunctionMode):
    """Inside it, whoever asks for float32 gets float64.

    Many models compute norms, softmax or the loss in fp32 whatever they are given. A comparison
    in fp64 would then be one in fp32, and a rounding could not be told from a fault.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(_wider(value) for value in args)
        return func(*args, **{name: _wider(value) for name, value in (kwargs or {}).items()})


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
