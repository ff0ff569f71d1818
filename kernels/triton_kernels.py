"""The primitive passes of the codecs for GPUs, in Triton: the bytes of reference.py.

Imported only where there is Triton. Each function does what the one of its name in reference.py
does, in one pass over memory (two where a scale must be known first). Sums are taken in another
order than torch's, in fp64, so scales may differ by an ulp of fp32; all else is equal: divisions
round to nearest, and products that are added to are exact, so that fusing them changes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from claw_plan.kernels import reference
from claw_plan.kernels.reference import Fp8Format, hash_start

TILE = 1024
"""Elements a program takes where nothing asks for another number."""

largest, above = reference.largest, reference.above

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)
LARGEST = tl.constexpr(reference.LARGEST)
NEAREST = tl.constexpr(12582912.0)
"""1.5 · 2^23: added and taken away it leaves small numbers whole, halves to even."""


@triton.jit
def _partial_sums(x, out, numel, squares: tl.constexpr, tile: tl.constexpr) -> None:
    place = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    value = tl.load(x + place, mask=place < numel, other=0.0).to(tl.float64)
    tl.store(out + tl.program_id(0), tl.sum(value * value if squares else tl.abs(value), 0))


@triton.jit
def _pack_signs(x, out, numel, size, tile: tl.constexpr) -> None:
    byte = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    bit = tl.arange(0, 8)
    place = byte[:, None] * 8 + bit[None, :]
    value = tl.load(x + place, mask=place < numel, other=-1.0)
    packed = tl.sum((value >= 0).to(tl.int32) << bit[None, :], 1)
    tl.store(out + byte, packed.to(tl.uint8), mask=byte < size)


@triton.jit
def _unpack_signs(codes, scale, out, numel, tile: tl.constexpr) -> None:
    place = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    byte = tl.load(codes + place // 8, mask=place < numel, other=0).to(tl.int32)
    positive = (byte >> (place % 8).to(tl.int32)) & 1
    magnitude = tl.load(scale)
    tl.store(out + place, tl.where(positive == 1, magnitude, -magnitude), mask=place < numel)


@triton.jit(do_not_specialize=["start"])
def _encode_ints(
    x,
    scales,
    codes,
    numel,
    blocks,
    start,
    limit: tl.constexpr,
    at_random: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    place = row[:, None] * block + tl.arange(0, block)[None, :]
    value = tl.load(x + place, mask=place < numel, other=0.0)
    bits = value.to(tl.int32, bitcast=True)
    most = tl.max(bits & MAGNITUDE, 1)
    finite = most < INFINITY
    scale = tl.math.div_rn(most.to(tl.float32, bitcast=True), limit * 1.0)
    tl.store(scales + row, tl.where(finite, scale, float("nan")), mask=row < blocks)
    divisor = tl.where(finite & (scale > 0), scale, 1.0)
    usable = tl.where(finite[:, None], value, 0.0)
    quotient = tl.math.div_rn(usable, tl.broadcast_to(divisor[:, None], value.shape))
    if at_random:
        # Elements of the two halves of a block share a hash: both make it.
        column = tl.arange(0, block)[None, :]
        other = place - column + (column ^ (block // 2))
        partner = tl.load(x + other, mask=other < numel, other=0.0).to(tl.int32, bitcast=True)
        is_first = column < block // 2
        first = tl.where(is_first, bits, partner).to(tl.uint32, bitcast=True)
        second = tl.where(is_first, partner, bits).to(tl.uint32, bitcast=True)
        h = first + ((second << 15) | (second >> 17)) + start.to(tl.uint32)
        h += tl.where(is_first, place, other).to(tl.uint32) * 0x9E3779B1
        h = (h ^ (h >> 16)) * 0x85EBCA6B
        h = (h ^ (h >> 13)) * 0xC2B2AE35
        h = h ^ (h >> 16)
        half = tl.where(is_first, h >> 16, h & 0xFFFF)
        fraction = (half.to(tl.int32).to(tl.float32) + 0.5) * (1.0 / 65536.0)
        rounded = tl.floor(quotient + fraction)
    else:
        rounded = (quotient + NEAREST) - NEAREST
    whole = tl.where(finite[:, None], rounded, 0.0).to(tl.int32)
    whole = tl.minimum(tl.maximum(whole, -limit), limit)
    tl.store(codes + place, whole.to(tl.int8), mask=place < numel)


@triton.jit
def _decode_ints(codes, scales, out, numel, block: tl.constexpr, tile: tl.constexpr) -> None:
    place = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    inside = place < numel
    scale = tl.load(scales + place // block, mask=inside, other=0.0)
    value = tl.load(codes + place, mask=inside, other=0).to(tl.float32) * scale
    value = tl.where(value > LARGEST, LARGEST, tl.where(value < -LARGEST, -LARGEST, value))
    tl.store(out + place, value, mask=inside)


@triton.jit
def _pack_nibbles(codes, out, numel, size, tile: tl.constexpr) -> None:
    byte = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    low = tl.load(codes + 2 * byte, mask=2 * byte < numel, other=0).to(tl.int32) & 15
    high = tl.load(codes + 2 * byte + 1, mask=2 * byte + 1 < numel, other=0).to(tl.int32) & 15
    tl.store(out + byte, (low | (high << 4)).to(tl.uint8), mask=byte < size)


@triton.jit
def _unpack_nibbles(packed, out, numel, tile: tl.constexpr) -> None:
    place = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    byte = tl.load(packed + place // 2, mask=place < numel, other=0).to(tl.int32)
    nibble = (byte >> (place % 2 * 4).to(tl.int32)) & 15
    tl.store(out + place, ((nibble ^ 8) - 8).to(tl.int8), mask=place < numel)


@triton.jit
def _encode_fp8(
    x,
    codes,
    exponents,
    numel,
    blocks,
    mantissa: tl.constexpr,
    bias: tl.constexpr,
    highest: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    place = row[:, None] * block + tl.arange(0, block)[None, :]
    value = tl.load(x + place, mask=place < numel, other=0.0)
    bits = value.to(tl.int32, bitcast=True)
    most = tl.max(bits & MAGNITUDE, 1)
    finite = most < INFINITY
    exponent = (most >> 23) + ((most & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.maximum(exponent, highest + 1)
    tl.store(exponents + row, tl.where(finite, exponent, 0).to(tl.uint8), mask=row < blocks)
    factor = ((highest + 254 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = tl.abs(value * factor[:, None])
    raw = scaled.to(tl.int32, bitcast=True)
    shift: tl.constexpr = 23 - mantissa
    carried = raw + ((1 << (shift - 1)) - 1) + ((raw >> shift) & 1)
    normal = (carried >> shift) - ((127 - bias) << mantissa)
    # Adding 2^23 of the format's least steps leaves their number in the lowest bits.
    steps: tl.constexpr = 151 - bias - mantissa
    magic = tl.full(scaled.shape, steps << 23, tl.int32).to(tl.float32, bitcast=True)
    small = (scaled + magic).to(tl.int32, bitcast=True) - (steps << 23)
    magnitude = tl.where(raw >= ((128 - bias) << 23), normal, small)
    code = magnitude | ((bits >> 24) & 128)
    code = tl.where(finite[:, None], code, 0)
    tl.store(codes + place, code.to(tl.uint8), mask=place < numel)


@triton.jit
def _decode_fp8(
    codes,
    exponents,
    out,
    numel,
    mantissa: tl.constexpr,
    bias: tl.constexpr,
    highest: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    inside = place < numel
    code = tl.load(codes + place, mask=inside, other=0).to(tl.int32)
    exponent = tl.load(exponents + place // block, mask=inside, other=0).to(tl.int32)
    magnitude = code & 127
    normal = (magnitude << (23 - mantissa)) + ((127 - bias) << 23)
    unit = tl.full(code.shape, (128 - bias - mantissa) << 23, tl.int32)
    small = magnitude.to(tl.float32) * unit.to(tl.float32, bitcast=True)
    value = tl.where(magnitude < (1 << mantissa), small, normal.to(tl.float32, bitcast=True))
    value = tl.minimum(value * ((exponent - highest) << 23).to(tl.float32, bitcast=True), LARGEST)
    value = tl.where(code >= 128, -value, value)
    tl.store(out + place, tl.where(exponent > 0, value, float("nan")), mask=inside)


def mean_abs(x: Tensor) -> Tensor:
    """As reference.mean_abs, to an ulp."""
    return reference.finite_or_nan(_sum(x, squares=False) / x.numel())


def root_mean_square(x: Tensor) -> Tensor:
    """As reference.root_mean_square, to an ulp."""
    return reference.finite_or_nan((_sum(x, squares=True) / x.numel()).sqrt())


def pack_signs(x: Tensor, out: Tensor) -> None:
    """As reference.pack_signs."""
    tile = TILE // 8
    _pack_signs[_programs(out.numel(), tile)](x, out, x.numel(), out.numel(), tile=tile)


def unpack_signs(codes: Tensor, scale: Tensor, out: Tensor) -> None:
    """As reference.unpack_signs."""
    _unpack_signs[_programs(out.numel())](codes, scale, out, out.numel(), tile=TILE)


def encode_ints(
    x: Tensor, block: int, limit: int, seed: int | None, scales: Tensor, codes: Tensor
) -> None:
    """As reference.encode_ints."""
    rows = max(1, TILE // block)
    _encode_ints[_programs(scales.numel(), rows)](
        *(x, scales, codes, x.numel(), scales.numel(), hash_start(seed or 0, 0)),
        limit=limit,
        at_random=seed is not None,
        block=block,
        rows=rows,
    )


def decode_ints(codes: Tensor, scales: Tensor, block: int, out: Tensor) -> None:
    """As reference.decode_ints."""
    _decode_ints[_programs(out.numel())](codes, scales, out, out.numel(), block=block, tile=TILE)


def pack_nibbles(codes: Tensor, out: Tensor) -> None:
    """As reference.pack_nibbles."""
    _pack_nibbles[_programs(out.numel())](codes, out, codes.numel(), out.numel(), tile=TILE)


def unpack_nibbles(packed: Tensor, out: Tensor) -> None:
    """As reference.unpack_nibbles."""
    _unpack_nibbles[_programs(out.numel())](packed, out, out.numel(), tile=TILE)


def encode_fp8(x: Tensor, block: int, form: Fp8Format, codes: Tensor, exponents: Tensor) -> None:
    """As reference.encode_fp8."""
    rows = max(1, TILE // block)
    _encode_fp8[_programs(exponents.numel(), rows)](
        *(x, codes, exponents, x.numel(), exponents.numel()),
        mantissa=form.mantissa_bits,
        bias=form.bias,
        highest=form.largest_exponent,
        block=block,
        rows=rows,
    )


def decode_fp8(codes: Tensor, exponents: Tensor, block: int, form: Fp8Format, out: Tensor) -> None:
    """As reference.decode_fp8."""
    _decode_fp8[_programs(out.numel())](
        *(codes, exponents, out, out.numel()),
        mantissa=form.mantissa_bits,
        bias=form.bias,
        highest=form.largest_exponent,
        block=block,
        tile=TILE,
    )


def _sum(x: Tensor, *, squares: bool) -> Tensor:
    tile = 4 * TILE
    (programs,) = _programs(x.numel(), tile)
    partial = torch.empty(programs, dtype=torch.float64, device=x.device)
    _partial_sums[(programs,)](x, partial, x.numel(), squares=squares, tile=tile)
    return partial.sum()


def _programs(size: int, tile: int = TILE) -> tuple[int]:
    return (-(-size // tile),)
