"""The loops of compiled.py, over NumPy arrays, for numba to turn into vector instructions.

What that needs: contiguous arrays, no branches that leave the inner loop, and indices of which the
compiler can see that they are not negative; hence blocks are the rows of two-dimensional arrays.
Sums may be taken in any order. Bits of floats come as a second array over the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite.binding import get_host_cpu_features  # type: ignore[import-untyped]
from numpy.typing import NDArray

from claw_plan.kernels.compiled_words import (
    hashed_pair,
    larger_magnitude,
    lower_fraction,
    upper_fraction,
)

Function = TypeVar("Function", bound=Callable[..., Any])
Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Bytes = NDArray[np.uint8]
SmallInts = NDArray[np.int8]

F, I, U = np.float32, np.int32, np.uint32  # noqa: E741 - short, as types of literals are

MAGNITUDE = I(0x7FFFFFFF)
"""All bits of an fp32 number but its sign; as whole numbers they are ordered like magnitudes."""
INFINITY = I(0x7F800000)
LARGEST = F(np.finfo(np.float32).max)

TILE = 4096
"""Elements of a tile: it, what is decoded of it and its codes fit into the nearest cache."""


def _use_wide_vectors() -> None:
    """Lets LLVM use all 512 bits of vectors where there are so many, unless a user chose.

    It keeps to 256 on many Intel processors, for fear of a lower clock; these loops gain from all,
    random rounding most, which becomes nearly twice as fast (docs/codecs.md).
    """
    config: Any = numba.config
    features = get_host_cpu_features()
    if config.CPU_FEATURES is None and features.get("avx512f"):
        config.CPU_FEATURES = f"{features.flatten()},-prefer-256-bit"


_use_wide_vectors()


def vectorized(function: Function) -> Function:
    """The function compiled for this processor, once for all processes where that can be kept."""
    njit: Any = numba.njit  # its types leave out these options
    options = {"fastmath": {"reassoc"}, "error_model": "numpy"}
    try:
        return cast(Function, njit(cache=True, **options)(function))
    except RuntimeError:  # numba found no folder it may write to
        return cast(Function, njit(**options)(function))


@vectorized
def sum_abs(x: Floats) -> float:
    """|x|₁ in fp64."""
    total = 0.0
    for i in range(x.size):
        total += abs(np.float64(x[i]))
    return total


@vectorized
def sum_square(x: Floats) -> float:
    """|x|₂² in fp64."""
    total = 0.0
    for i in range(x.size):
        total += np.float64(x[i]) * np.float64(x[i])
    return total


@vectorized
def add(x: Floats, y: Floats, out: Floats) -> None:
    """Their sum."""
    for i in range(out.size):
        out[i] = x[i] + y[i]


@vectorized
def subtract(out: Floats, x: Floats) -> None:
    """Takes x away in place."""
    for i in range(out.size):
        out[i] -= x[i]


@vectorized
def pack_signs(x: Floats, out: Bytes) -> None:
    """Eight elements a byte."""
    for i in range(out.size):
        byte = np.uint8(0)
        for j in range(8):
            byte |= np.uint8(x[8 * i + j] >= 0) << np.uint8(j)
        out[i] = byte


@vectorized
def unpack_signs(codes: Bytes, scale: np.float32, out: Floats) -> None:
    """Eight elements a byte."""
    for i in range(codes.size):
        for j in range(8):
            out[8 * i + j] = scale if (codes[i] >> np.uint8(j)) & 1 else -scale


@vectorized
def largest_magnitude(bits: Ints, row: int) -> np.int32:
    """The bits of the largest |x| of a row; of NaN if there is one."""
    largest = I(0)
    for j in range(bits.shape[1]):
        largest = larger_magnitude(largest, bits[row, j])
    return largest


@vectorized
def row_scale(bits: Ints, row: int, limit: np.float32, scales: Floats, raw: Ints) -> bool:
    """Writes largest/limit, or NaN; returns whether the row is finite."""
    raw[row] = largest_magnitude(bits, row)
    finite = raw[row] < INFINITY
    scales[row] = scales[row] / limit if finite else F(np.nan)
    return bool(finite)


@vectorized
def round_to_nearest(
    x: Floats, bits: Ints, limit: np.float32, scales: Floats, raw: Ints, out: SmallInts
) -> None:
    """One scale a row; halves to even. `raw` are the bits of `scales`."""
    most = I(limit)
    for b in range(x.shape[0]):
        if not row_scale(bits, b, limit, scales, raw):
            out[b, :] = 0
            continue
        divisor = scales[b] if scales[b] > 0 else F(1)
        for j in range(x.shape[1]):
            code = I(np.rint(x[b, j] / divisor))
            out[b, j] = np.int8(min(max(code, -most), most))


@vectorized
def round_at_random(
    x: Floats,
    bits: Ints,
    limit: np.float32,
    start: np.uint32,
    scales: Floats,
    raw: Ints,
    out: SmallInts,
) -> None:
    """The same, up with the probability of the fraction; `start` is where the hash begins.

    Rows are of even length; the elements of their two halves share random bits in pairs.
    """
    most = I(limit)
    half = x.shape[1] // 2
    for b in range(x.shape[0]):
        if not row_scale(bits, b, limit, scales, raw):
            out[b, :] = 0
            continue
        divisor = scales[b] if scales[b] > 0 else F(1)
        for j in range(half):
            word = hashed_pair(start, b * 2 * half + j, bits[b, j], bits[b, j + half])
            first = I(np.floor(x[b, j] / divisor + upper_fraction(word)))
            second = I(np.floor(x[b, j + half] / divisor + lower_fraction(word)))
            out[b, j] = np.int8(min(max(first, -most), most))
            out[b, j + half] = np.int8(min(max(second, -most), most))


@vectorized
def scale_back(codes: SmallInts, scales: Floats, out: Floats) -> None:
    """Code times the row's scale, never beyond the largest number by rounding."""
    for b in range(codes.shape[0]):
        scale = scales[b]
        if np.isnan(scale):
            out[b, :] = scale
            continue
        for j in range(codes.shape[1]):
            out[b, j] = min(max(F(codes[b, j]) * scale, -LARGEST), LARGEST)


@vectorized
def pack_nibbles(codes: SmallInts, out: Bytes) -> None:
    """Two codes a byte, the first in the low half."""
    for i in range(out.size):
        out[i] = np.uint8(codes[2 * i] & 15) | np.uint8((codes[2 * i + 1] & 15) << 4)


@vectorized
def unpack_nibbles(packed: Bytes, out: SmallInts) -> None:
    """The two codes of a byte with their signs."""
    for i in range(packed.size):
        out[2 * i] = np.int8(np.int8(packed[i] << np.uint8(4)) >> np.int8(4))
        out[2 * i + 1] = np.int8(np.int8(packed[i]) >> np.int8(4))


@vectorized
def encode_fp8(
    x: Floats, bits: Ints, mantissa: int, bias: int, codes: Bytes, exponents: Bytes
) -> None:
    """One exponent a row; halves to even."""
    shift, smallest_normal = U(23 - mantissa), U((128 - bias) << 23)
    offset, half = U((127 - bias) << mantissa), U((1 << (22 - mantissa)) - 1)
    per_unit = F(2.0 ** (bias - 1 + mantissa))
    top = (15 if bias == 15 else 8) + 127
    scaled = np.empty(x.shape[1], np.float32)
    raw = scaled.view(np.uint32)
    inverse = np.empty(1, np.float32)
    inverse_bits = inverse.view(np.int32)
    for b in range(x.shape[0]):
        largest = largest_magnitude(bits, b)
        if largest >= INFINITY:
            codes[b, :] = 0
            exponents[b] = 0
            continue
        exponent = max((largest >> 23) + I((largest & I(0x7FFFFF)) > 0x600000), I(top - 126))
        exponents[b] = exponent
        inverse_bits[0] = I(top + 127 - exponent) << 23
        factor = inverse[0]
        for j in range(x.shape[1]):
            scaled[j] = abs(x[b, j] * factor)
        for j in range(x.shape[1]):
            v = raw[j]
            normal = ((v + half + ((v >> shift) & U(1))) >> shift) - offset
            small = U(I(np.rint(scaled[j] * per_unit)))
            sign = (U(bits[b, j]) >> U(24)) & U(128)
            codes[b, j] = np.uint8((normal if v >= smallest_normal else small) | sign)


@vectorized
def decode_fp8(
    codes: Bytes, exponents: Bytes, mantissa: int, bias: int, out: Floats, bits: Ints
) -> None:
    """Code times the row's power of two, never beyond the largest number by rounding."""
    shift, offset, first_normal = U(23 - mantissa), U((127 - bias) << 23), U(1 << mantissa)
    unit = F(2.0 ** (1 - bias - mantissa))
    top = (15 if bias == 15 else 8) + 127
    scale = np.empty(1, np.float32)
    scale_bits = scale.view(np.int32)
    for b in range(codes.shape[0]):
        if exponents[b] == 0:
            out[b, :] = np.nan
            continue
        scale_bits[0] = I(I(exponents[b]) - top + 127) << 23
        factor = scale[0]
        for j in range(codes.shape[1]):
            bits[b, j] = I(((U(codes[b, j]) & U(127)) << shift) + offset)
        for j in range(codes.shape[1]):
            magnitude = U(codes[b, j]) & U(127)
            value = out[b, j] if magnitude >= first_normal else F(I(magnitude)) * unit
            value = min(value * factor, LARGEST)
            out[b, j] = -value if codes[b, j] >= 128 else value
