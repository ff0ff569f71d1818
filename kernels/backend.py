"""Which implementation of the primitive passes serves a tensor: by its device."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Protocol, cast

from torch import Tensor

from claw_plan.kernels import compiled, reference
from claw_plan.kernels.reference import Fp8Format


class Backend(Protocol):
    """The primitive passes; reference.py says what each does."""

    # ruff: noqa: D102
    def mean_abs(self, x: Tensor) -> Tensor: ...
    def root_mean_square(self, x: Tensor) -> Tensor: ...
    def pack_signs(self, x: Tensor, out: Tensor) -> None: ...
    def unpack_signs(self, codes: Tensor, scale: Tensor, out: Tensor) -> None: ...
    def encode_ints(
        self,
        x: Tensor,
        block: int,
        limit: int,
        seed: int | None,
        scales: Tensor,
        codes: Tensor,
    ) -> None: ...
    def decode_ints(self, codes: Tensor, scales: Tensor, block: int, out: Tensor) -> None: ...
    def pack_nibbles(self, codes: Tensor, out: Tensor) -> None: ...
    def unpack_nibbles(self, packed: Tensor, out: Tensor) -> None: ...
    def encode_fp8(
        self, x: Tensor, block: int, form: Fp8Format, codes: Tensor, exponents: Tensor
    ) -> None: ...
    def decode_fp8(
        self, codes: Tensor, exponents: Tensor, block: int, form: Fp8Format, out: Tensor
    ) -> None: ...
    def largest(self, x: Tensor, count: int) -> tuple[Tensor, Tensor]: ...
    def above(self, x: Tensor, threshold: float) -> tuple[Tensor, Tensor]: ...


def backend_of(tensor: Tensor) -> Backend:
    """The fastest that there is for where the tensor lies."""
    return _backend(tensor.device.type)


@cache
def _backend(device_type: str) -> Backend:
    if device_type == "cpu":
        return compiled
    if device_type == "cuda" and importlib.util.find_spec("triton"):
        return cast(Backend, importlib.import_module("claw_plan.kernels.triton_kernels"))
    return reference
