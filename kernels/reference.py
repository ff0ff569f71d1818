"""The primitive passes of the codecs in plain torch, for any device: the definition of the codes.

`x` is a contiguous, non-empty fp32 tensor; results are written into what the caller gives. Blocks
are of equal length but the last, which may be shorter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = torch.finfo(torch.float32).max
WORD = 0xFFFFFFFF
HASH_STEP = 0x9E3779B1
"""What the hash of the next element begins with more: 2^32 over the golden ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Format:
    """Formats of OCP's 8-bit floating point specification (OFP8, 2023, table 1)."""

    dtype: torch.dtype
    mantissa_bits: int
    bias: int
    largest_exponent: int
    """Of the largest number, 1.75 times two to this."""


E4M3 = Fp8Format(dtype=torch.float8_e4m3fn, mantissa_bits=3, bias=7, largest_exponent=8)
E5M2 = Fp8Format(dtype=torch.float8_e5m2, mantissa_bits=2, bias=15, largest_exponent=15)


def mean_abs(x: Tensor) -> Tensor:
    """|x|₁/n, summed in fp64, as an fp32 scalar; NaN unless all of x is finite."""
    return finite_or_nan(x.abs().sum(dtype=torch.float64) / x.numel())


def root_mean_square(x: Tensor) -> Tensor:
    """|x|₂/√n, summed in fp64, as an fp32 scalar; NaN unless all of x is finite."""
    return finite_or_nan((x.double().square().sum() / x.numel()).sqrt())


def pack_signs(x: Tensor, out: Tensor) -> None:
    """Bit j of byte i tells whether x[8i + j] >= 0, so both zeros are positive; then zeros."""
    bits = torch.zeros(8 * out.numel(), dtype=torch.uint8, device=x.device)
    bits[: x.numel()] = x >= 0
    out.copy_((bits.view(-1, 8) << _places(x.device)).sum(1, dtype=torch.uint8))


def unpack_signs(codes: Tensor, scale: Tensor, out: Tensor) -> None:
    """`scale` where the bit is set and -`scale` elsewhere."""
    bits = (codes[:, None] >> _places(codes.device)) & 1
    torch.where(bits.view(-1)[: out.numel()].bool(), scale, -scale, out=out)


def encode_ints(
    x: Tensor, block: int, limit: int, seed: int | None, scales: Tensor, codes: Tensor
) -> None:
    """Codes of -limit to limit (int8) and one scale a block, the largest magnitude over limit.

    The nearest code, halves to even; with a seed the one below or above at random, so that the
    mean is right. A block that is not finite has the scale NaN and codes of zero.
    """
    rows = _blocks_of(x, block)
    largest = rows.abs().amax(1)
    finite = largest.isfinite()
    scales.copy_(torch.where(finite, largest / limit, torch.nan))
    # The quotient of a magnitude near the smallest number may be zero.
    divisor = torch.where(scales > 0, scales, 1.0)
    rounded = rows / divisor[:, None]
    if seed is None:
        rounded = rounded.round()
    else:
        rounded = (rounded + random_fractions(rows, seed)).floor()
    rounded = torch.where(finite[:, None], rounded, 0).clamp_(-limit, limit)
    codes.copy_(rounded.view(-1)[: x.numel()])


def decode_ints(codes: Tensor, scales: Tensor, block: int, out: Tensor) -> None:
    """Code times scale, never beyond the largest number by rounding."""
    rows = _blocks_of(codes.float(), block) * scales[:, None]
    out.copy_(rows.clamp_(-LARGEST, LARGEST).view(-1)[: out.numel()])


def pack_nibbles(codes: Tensor, out: Tensor) -> None:
    """Two codes of -8 to 7 a byte, the first in the low half; then zeros."""
    pairs = F.pad(codes, (0, codes.numel() % 2)).view(torch.uint8).view(-1, 2) & 15
    out.copy_(pairs[:, 0] | (pairs[:, 1] << 4))


def unpack_nibbles(packed: Tensor, out: Tensor) -> None:
    """The codes with their signs."""
    pairs = torch.stack([packed & 15, packed >> 4], 1).view(-1)[: out.numel()]
    out.copy_((pairs.to(torch.int8) ^ 8) - 8)


def encode_fp8(x: Tensor, block: int, form: Fp8Format, codes: Tensor, exponents: Tensor) -> None:
    """fp8 of x / 2^(e - 127 - largest_exponent), with one exponent e, a byte, for each block.

    e is the least power of two that keeps the block within the format, so scaling is exact and
    the error that of fp8's own rounding, to nearest, halves to even. It is not below
    largest_exponent + 1, that the factors may be normal numbers. A block that is not finite has
    exponent 0 and codes of zero.
    """
    rows = _blocks_of(x, block)
    largest = rows.abs().amax(1)
    bits = largest.view(torch.int32)
    beyond = (bits & 0x7FFFFF) > 0x600000
    least = form.largest_exponent + 1
    exponent = ((bits >> 23) + beyond).clamp(min=least)
    finite = largest.isfinite()
    factor = ((form.largest_exponent + 254 - exponent) << 23).view(torch.float32)
    scaled = torch.where(finite[:, None], rows * factor[:, None], 0)
    codes.copy_(scaled.to(form.dtype).view(torch.uint8).view(-1)[: x.numel()])
    exponents.copy_(torch.where(finite, exponent, 0))


def decode_fp8(codes: Tensor, exponents: Tensor, block: int, form: Fp8Format, out: Tensor) -> None:
    """The number back, never beyond the largest by rounding."""
    biased = exponents.int() - form.largest_exponent
    factor = (biased << 23).view(torch.float32)
    factor = torch.where(exponents > 0, factor, torch.nan)
    rows = _blocks_of(codes.view(form.dtype).float(), block) * factor[:, None]
    out.copy_(rows.clamp_(-LARGEST, LARGEST).view(-1)[: out.numel()])


def largest(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Indices, ascending, and values of the largest magnitudes; NaN is the largest, ties free."""
    indices = x.abs().topk(count, sorted=False).indices.sort().values
    return indices, x[indices]


def above(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Indices, ascending, and values of the magnitudes above the threshold; NaN is."""
    indices = (~(x.abs() <= threshold)).nonzero().view(-1)
    return indices, x[indices]


def random_fractions(rows: Tensor, seed: int) -> Tensor:
    """In (0, 1), by a hash of the seed, the place and the bits: no generator's state is touched.

    One hash serves an element of the first half of a row (its upper 16 bits) and that of the
    second half (its lower); each stands for the middle of its 65,536th, so that what is rounded
    with it is right in the mean to 2^-17. Source: the mixing steps of MurmurHash3's fmix32
    (Appleby, public domain).
    """
    half = rows.shape[1] // 2
    first, second = rows.contiguous().view(torch.int32).long().split(half, 1)
    second = second & WORD
    places = torch.arange(rows.numel(), device=rows.device).view_as(rows)[:, :half]
    h = first + ((second << 15) | (second >> 17)) + hash_start(seed, 0) + places * HASH_STEP
    h = h & WORD
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & WORD
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & WORD
    h = h ^ (h >> 16)
    return (torch.cat([h >> 16, h & 0xFFFF], 1).float() + 0.5) * 2.0**-16


def hash_start(seed: int, place: int) -> int:
    """What the hash of the element at `place` adds to its bits."""
    return (seed * 0x85EBCA77 + place * HASH_STEP) & WORD


def _blocks_of(x: Tensor, block: int) -> Tensor:
    return F.pad(x, (0, -x.numel() % block)).view(-1, block)


def _places(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def finite_or_nan(scale: Tensor) -> Tensor:
    """The scale in fp32; NaN unless it is finite there."""
    narrow = scale.float()
    return torch.where(narrow.isfinite(), narrow, torch.nan)
