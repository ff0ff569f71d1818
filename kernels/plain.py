"""Codecs that only change the number format: `none` (fp32 or fp64 as they are) and `fp16`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from claw_plan.kernels.codec_base import Codec, typed

PIECE = 1 << 17
"""Elements that are scaled and converted in turn while they lie in a cache."""


@dataclass(frozen=True, slots=True)
class Uncompressed(Codec):
    """The bits themselves: exact for fp32 and narrower; `none:fp64` for fp64 too."""

    name: ClassVar[str] = "none"
    needs_error_feedback: ClassVar[bool] = False
    format: Literal["fp32", "fp64"] = "fp32"

    @property
    def contraction(self) -> float | None:
        """Nothing is lost."""
        return 0.0

    @property
    def working_dtype(self) -> torch.dtype:
        """What is sent."""
        return torch.float32 if self.format == "fp32" else torch.float64

    def _payload_bytes(self, numel: int) -> int:
        return numel * self.working_dtype.itemsize

    def _encode(self, x: Tensor) -> Tensor:
        return x.clone().view(torch.uint8)

    def _decode(self, codes: Tensor, out: Tensor) -> None:
        out.copy_(typed(codes, self.working_dtype))


@dataclass(frozen=True, slots=True)
class Half(Codec):
    """fp16 of x · 2^exponent. All ranks must agree on the exponent: it is not sent.

    Scaling by a power of two changes nothing but which elements underflow and overflow; between
    them the error of an element is at most 2^-11 of it. Beyond 65504 · 2^-exponent it decodes to
    infinity, which `Fp16Scale` takes as the sign to back off.
    """

    name: ClassVar[str] = "fp16"
    needs_error_feedback: ClassVar[bool] = False
    exponent: int = 0

    @property
    def contraction(self) -> float | None:
        """None: what underflows is lost whole, what overflows is infinite."""
        return None

    def _payload_bytes(self, numel: int) -> int:
        return 2 * numel

    def _encode(self, x: Tensor) -> Tensor:
        codes = self._buffer(x)
        half = codes[: 2 * x.numel()].view(torch.float16)
        if not self.exponent:
            half.copy_(x)
            return codes
        scaled = torch.empty_like(x[:PIECE])
        for whole, part in zip(x.split(PIECE), half.split(PIECE), strict=True):
            part.copy_(torch.mul(whole, 2.0**self.exponent, out=scaled[: part.numel()]))
        return codes

    def _decode(self, codes: Tensor, out: Tensor) -> None:
        half = typed(codes[: 2 * out.numel()], torch.float16)
        for part, whole in zip(half.split(PIECE), out.split(PIECE), strict=True):
            whole.copy_(part)
            if self.exponent:
                whole.mul_(2.0**-self.exponent)
