"""The primitive passes of the codecs in plain torch, for any device: the definition of the codes.

`x` is a contiguous, non-empty fp32 tensor. Results are written into what the caller gives.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mean_abs(x: Tensor) -> Tensor:
    """|x|₁/n, summed in fp64, as an fp32 scalar; NaN unless all of x is finite."""
    return _finite_or_nan(x.abs().sum(dtype=torch.float64) / x.numel())


def root_mean_square(x: Tensor) -> Tensor:
    """|x|₂/√n, summed in fp64, as an fp32 scalar; NaN unless all of x is finite."""
    return _finite_or_nan((x.double().square().sum() / x.numel()).sqrt())


def pack_signs(x: Tensor, out: Tensor) -> None:
    """Bit j of byte i tells whether x[8i + j] >= 0, so both zeros are positive; then zeros."""
    bits = torch.zeros(8 * out.numel(), dtype=torch.uint8, device=x.device)
    bits[: x.numel()] = x >= 0
    out.copy_((bits.view(-1, 8) << _places(x.device)).sum(1, dtype=torch.uint8))


def unpack_signs(codes: Tensor, scale: Tensor, out: Tensor) -> None:
    """`scale` where the bit is set and -`scale` elsewhere."""
    bits = (codes[:, None] >> _places(codes.device)) & 1
    torch.where(bits.view(-1)[: out.numel()].bool(), scale, -scale, out=out)


def _places(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def _finite_or_nan(scale: Tensor) -> Tensor:
    narrow = scale.float()
    return torch.where(narrow.isfinite(), narrow, torch.nan)
