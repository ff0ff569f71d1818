"""Error feedback of codecs on the CPU in one pass or two: for error_feedback.py.

What is sent of x + before, and what that leaves out, tile by tile while a tile is in the nearest
cache. Codes and rest are those of adding, encoding, decoding and subtracting one after the other,
which go through all of memory four times; the loops are the same. Each function answers whether
all that came was finite.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from claw_plan.kernels import compiled_loops as loops
from claw_plan.kernels.compiled import finite_or_nan, pack_signs, padded, rows_of
from claw_plan.kernels.compiled_loops import (
    TILE,
    Bytes,
    F,
    Floats,
    Ints,
    SmallInts,
    U,
    vectorized,
)
from claw_plan.kernels.reference import HASH_STEP, Fp8Format, hash_start


def encode_ints(
    x: Tensor,
    before: Tensor,
    rest: Tensor,
    block: int,
    limit: int,
    seed: int | None,
    scales: Tensor,
    codes: Tensor,
) -> bool:
    """Fills in the rest, the scales, and codes of a byte each, or of half one as there is room."""
    packs = codes.numel() < x.numel()
    for part, rows in rows_of(x.numel(), block):
        given, held, left = (padded(one.numpy()[part], block) for one in (x, before, rest))
        coded = slice(part.start // 2, -(-part.stop // 2)) if packs else part
        flat = codes.numpy()[coded].view(np.int8)
        small = padded(flat, block // 2 if packs else block)
        scale, start = scales.numpy()[rows], U(hash_start(seed or 0, part.start))
        feed_ints(
            given,
            held,
            left,
            left.view(np.int32),
            F(limit),
            seed is not None,
            start,
            scale,
            scale.view(np.int32),
            small,
            small.view(np.uint8),
        )
        _put_back(small, flat)
        _put_back(left, rest.numpy()[part])
    return bool(np.isfinite(scales.numpy()).all())


def encode_fp8(
    x: Tensor,
    before: Tensor,
    rest: Tensor,
    block: int,
    form: Fp8Format,
    codes: Tensor,
    exponents: Tensor,
) -> bool:
    """Fills in the rest, the codes and the exponents."""
    for part, rows in rows_of(x.numel(), block):
        given, held, left = (padded(one.numpy()[part], block) for one in (x, before, rest))
        small = padded(codes.numpy()[part], block)
        own, bits = exponents.numpy()[rows], left.view(np.int32)
        feed_fp8(given, held, left, bits, form.mantissa_bits, form.bias, small, own)
        _put_back(small, codes.numpy()[part])
        _put_back(left, rest.numpy()[part])
    return bool(exponents.numpy().all())


def encode_signs(
    x: Tensor, before: Tensor, rest: Tensor, squares: bool, scale: Tensor, signs: Tensor
) -> bool:
    """Fills in the rest, the scale (that of the L2 norm where of `squares`) and the signs."""
    mean = feed_sum(x.numpy(), before.numpy(), rest.numpy(), squares) / x.numel()
    scale.copy_(finite_or_nan(math.sqrt(mean) if squares else mean))
    whole = x.numel() // 8
    feed_signs(rest.numpy()[: 8 * whole], F(scale.item()), signs.numpy()[:whole])
    if whole < signs.numel():
        end = rest[8 * whole :]
        pack_signs(end, signs[whole:])
        end.sub_(torch.where(end >= 0, scale, -scale))
    return bool(scale.isfinite())


def subtract_pairs(rest: Tensor, indices: Tensor, values: Tensor) -> bool:
    """Takes from `rest` what was sent of it; what is not finite always is."""
    subtract_at(rest.numpy(), indices.numpy(), values.numpy())
    return bool(values.isfinite().all())


def _put_back(grid: NDArray[Any], flat: NDArray[Any]) -> None:
    """From rows that are a copy, because the last was too short."""
    if grid.size != flat.size:
        flat[:] = grid.reshape(-1)[: flat.size]


@vectorized
def feed_ints(
    x: Floats,
    before: Floats,
    rest: Floats,
    bits: Ints,
    limit: np.float32,
    at_random: bool,
    start: np.uint32,
    scales: Floats,
    raw: Ints,
    codes: SmallInts,
    packed: Bytes,
) -> None:
    """One scale a row. `packed` are the bytes of `codes`, two codes each if rows are shorter."""
    block = x.shape[1]
    step = max(1, TILE // block)
    decoded, small = np.empty((step, block), F), np.empty((step, block), np.int8)
    for first in range(0, x.shape[0], step):
        last = min(first + step, x.shape[0])
        own = rest[first:last]
        flat = own.reshape(-1)
        loops.add(before[first:last].reshape(-1), x[first:last].reshape(-1), flat)
        packs = codes.shape[1] < block
        out = small[: last - first] if packs else codes[first:last]
        own_bits, scale = bits[first:last], scales[first:last]
        if at_random:
            place = U(start + U(U(first * block) * U(HASH_STEP)))
            loops.round_at_random(own, own_bits, limit, place, scale, raw[first:last], out)
        else:
            loops.round_to_nearest(own, own_bits, limit, scale, raw[first:last], out)
        loops.scale_back(out, scale, decoded)
        loops.subtract(flat, decoded.reshape(-1))
        if packs:
            loops.pack_nibbles(out.reshape(-1), packed[first:last].reshape(-1))


@vectorized
def feed_fp8(
    x: Floats,
    before: Floats,
    rest: Floats,
    bits: Ints,
    mantissa: int,
    bias: int,
    codes: Bytes,
    exponents: Bytes,
) -> None:
    """One exponent a row."""
    block = x.shape[1]
    step = max(1, TILE // block)
    decoded = np.empty((step, block), F)
    decoded_bits = decoded.view(np.int32)
    for first in range(0, x.shape[0], step):
        last = min(first + step, x.shape[0])
        own = rest[first:last]
        flat = own.reshape(-1)
        loops.add(before[first:last].reshape(-1), x[first:last].reshape(-1), flat)
        out, scale = codes[first:last], exponents[first:last]
        loops.encode_fp8(own, bits[first:last], mantissa, bias, out, scale)
        loops.decode_fp8(out, scale, mantissa, bias, decoded, decoded_bits)
        loops.subtract(flat, decoded.reshape(-1))


@vectorized
def feed_sum(x: Floats, before: Floats, rest: Floats, squares: bool) -> float:
    """Fills in x + before; the sum of its magnitudes, or of its squares, in fp64."""
    total = 0.0
    for first in range(0, x.size, TILE):
        last = min(first + TILE, x.size)
        own = rest[first:last]
        loops.add(before[first:last], x[first:last], own)
        total += loops.sum_square(own) if squares else loops.sum_abs(own)
    return total


@vectorized
def feed_signs(rest: Floats, scale: np.float32, signs: Bytes) -> None:
    """Fills in the signs, eight a byte, and takes what they say from `rest`."""
    for first in range(0, signs.size, TILE // 8):
        last = min(first + TILE // 8, signs.size)
        own = rest[8 * first : 8 * last]
        loops.pack_signs(own, signs[first:last])
        for i in range(own.size):
            own[i] -= scale if own[i] >= 0 else -scale


@vectorized
def subtract_at(rest: Floats, indices: Ints, values: Floats) -> None:
    """Takes values away from elements that are named once each."""
    for i in range(indices.size):
        rest[indices[i]] -= values[i]
