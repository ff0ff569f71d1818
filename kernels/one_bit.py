"""One bit per element and one scale per buffer: what 1-bit Adam and its kin send.

    decode(encode(x)) = s · sign(x),   s = |x|₁/n   or   |x|₂/√n

with sign(0) = +1. Of all s the first comes nearest to x; it always contracts:

    |x - s·sign(x)|² = |x|² - |x|₁²/n  <=  (1 - 1/n) |x|²

The second keeps the norm and is DeepSpeed's (runtime/comm/compressed.py). Its error is
2|x|² - 2|x|₂|x|₁/√n, more than |x|² where |x|₁ < √n |x|₂/2: on tensors with few large elements
error feedback then has to carry more than was there. Source: algebra; Tang et al., 1-bit Adam,
arXiv 2102.02888, for the use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from claw_plan.kernels import compiled_feedback
from claw_plan.kernels.backend import backend_of
from claw_plan.kernels.codec_base import Codec, lie_in_cpu_floats, typed

SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class OneBit(Codec):
    """Codes are the fp32 scale, then the signs, eight a byte, the first in the lowest bit."""

    name: ClassVar[str] = "one_bit"
    scale: Literal["l1", "l2"] = "l1"

    @property
    def contraction(self) -> float | None:
        """None: 1 - 1/n has no bound below one over all n, and the L2 scale none at all."""
        return None

    def _payload_bytes(self, numel: int) -> int:
        return SCALE_BYTES + -(-numel // 8)

    def encode_fused(self, x: Tensor, before: Tensor, rest: Tensor) -> tuple[Tensor, bool] | None:
        """As of any codec, in two passes on the CPU: the scale is known after the first."""
        if not x.numel() or not lie_in_cpu_floats(x, before, rest):
            return None
        codes = self._buffer(x)
        scale = codes[:SCALE_BYTES].view(torch.float32)[0]
        signs = codes[SCALE_BYTES : self._payload_bytes(x.numel())]
        finite = compiled_feedback.encode_signs(x, before, rest, self.scale == "l2", scale, signs)
        return codes, finite

    def _encode(self, x: Tensor) -> Tensor:
        codes = self._buffer(x)
        backend = backend_of(x)
        scale = backend.mean_abs(x) if self.scale == "l1" else backend.root_mean_square(x)
        codes[:SCALE_BYTES].view(torch.float32).copy_(scale)
        backend.pack_signs(x, codes[SCALE_BYTES : self._payload_bytes(x.numel())])
        return codes

    def _decode(self, codes: Tensor, out: Tensor) -> None:
        scale = typed(codes[:SCALE_BYTES], torch.float32)[0]
        signs = codes[SCALE_BYTES : self._payload_bytes(out.numel())]
        backend_of(codes).unpack_signs(signs, scale, out)
