"""Codecs that send few elements exactly, as (index, value), and nothing of the others.

`top_k` sends the largest ceil(density·n) magnitudes, so the size is known; `threshold` sends
every element above a magnitude, so it is not. Both leave

    |x - decode(encode(x))|² = sum of the squares that were not sent,

of `top_k` at most (1 - k/n)|x|², since what is left out is smaller than the mean. Of equal
magnitudes at the edge of `top_k` any may be sent. Source: Lin et al., Deep Gradient Compression,
arXiv 1712.01887; Stich et al., Sparsified SGD with Memory, arXiv 1809.07599, lemma A.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from claw_plan.kernels import compiled_feedback
from claw_plan.kernels.backend import backend_of
from claw_plan.kernels.codec_base import Codec, lie_in_cpu_floats, typed
from claw_plan.profiles.codecs import PAIR_BYTES, CodecError, kept_elements


class SparseCodec(Codec):
    """Codes are all int32 indices, ascending, then all fp32 values."""

    __slots__ = ()

    def indices(self, codes: Tensor) -> Tensor:
        """Which elements were sent, as int64."""
        return self._short_indices(codes).long()

    def _short_indices(self, codes: Tensor) -> Tensor:
        return typed(codes[: codes.numel() // 2], torch.int32)

    def values(self, codes: Tensor) -> Tensor:
        """The elements that were sent."""
        return typed(codes[codes.numel() // 2 :], torch.float32)

    def subtract_sent(self, total: Tensor, codes: Tensor) -> Tensor:
        """As of any codec, touching only what was sent."""
        return total.index_add_(
            0, self.indices(codes), self.values(codes).to(total.dtype), alpha=-1
        )

    def encode_fused(self, x: Tensor, before: Tensor, rest: Tensor) -> tuple[Tensor, bool] | None:
        """As of any codec; only what was sent is read again on the CPU."""
        if not x.numel() or not lie_in_cpu_floats(x, before, rest):
            return None
        codes = self._encode(torch.add(before, x, out=rest))
        indices, values = self._short_indices(codes), self.values(codes)
        return codes, compiled_feedback.subtract_pairs(rest, indices, values)

    def _decode(self, codes: Tensor, out: Tensor) -> None:
        out.zero_().index_copy_(0, self.indices(codes), self.values(codes))


def _pairs(indices: Tensor, values: Tensor) -> Tensor:
    codes = torch.empty(PAIR_BYTES * indices.numel(), dtype=torch.uint8, device=indices.device)
    middle = codes.numel() // 2
    codes[:middle].view(torch.int32).copy_(indices)
    codes[middle:].view(torch.float32).copy_(values)
    return codes


@dataclass(frozen=True, slots=True)
class TopK(SparseCodec):
    """The largest magnitudes; NaN counts as the largest of all."""

    name: ClassVar[str] = "top_k"
    density: float = 0.001

    @property
    def contraction(self) -> float | None:
        """1 - k/n, at most 1 - density."""
        return 1 - self.density

    def _payload_bytes(self, numel: int) -> int:
        return PAIR_BYTES * kept_elements(self.density, numel)

    def _encode(self, x: Tensor) -> Tensor:
        kept = kept_elements(self.density, x.numel())
        return _pairs(*backend_of(x).largest(x, kept))


@dataclass(frozen=True, slots=True)
class Threshold(SparseCodec):
    """Every element above the threshold in magnitude, or not finite; 0 sends all but zeros."""

    name: ClassVar[str] = "threshold"
    has_fixed_size: ClassVar[bool] = False
    threshold: float

    @property
    def contraction(self) -> float | None:
        """None: nothing is sent of a tensor that lies below the threshold."""
        return None

    def _payload_bytes(self, numel: int) -> int:
        return PAIR_BYTES * numel

    def _check(self, codes: Tensor, numel: int) -> None:
        if codes.dtype != torch.uint8 or codes.numel() % PAIR_BYTES:
            raise CodecError(
                f"codec threshold: codes are pairs of {PAIR_BYTES} bytes, "
                f"got {codes.numel()} bytes of {codes.dtype}"
            )

    def _encode(self, x: Tensor) -> Tensor:
        return _pairs(*backend_of(x).above(x, self.threshold))
