"""The primitive passes of the codecs for the CPU, compiled by numba: as fast as memory.

Torch has no operation that packs bits, and its reductions over short rows are slow on the CPU; a
plain loop that the compiler turns into vector instructions is several times faster. Each function
does what the one of its name in reference.py does; the loops are in compiled_loops.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from claw_plan.kernels import compiled_loops as loops
from claw_plan.kernels import compiled_selection as selection
from claw_plan.kernels.reference import Fp8Format, hash_start

Number = TypeVar("Number", bound=np.generic)


def mean_abs(x: Tensor) -> Tensor:
    """As reference.mean_abs."""
    return finite_or_nan(loops.sum_abs(x.numpy()) / x.numel())


def root_mean_square(x: Tensor) -> Tensor:
    """As reference.root_mean_square."""
    return finite_or_nan(math.sqrt(loops.sum_square(x.numpy()) / x.numel()))


def pack_signs(x: Tensor, out: Tensor) -> None:
    """As reference.pack_signs."""
    whole = x.numel() // 8
    loops.pack_signs(x.numpy(), out.numpy()[:whole])
    if whole < out.numel():
        rest = (x[8 * whole :] >= 0).numpy()
        out[whole] = int(np.packbits(rest, bitorder="little")[0])


def unpack_signs(codes: Tensor, scale: Tensor, out: Tensor) -> None:
    """As reference.unpack_signs."""
    whole = out.numel() // 8
    loops.unpack_signs(codes.numpy()[:whole], np.float32(scale.item()), out.numpy())
    if whole < codes.numel():
        bits = np.unpackbits(codes.numpy()[whole:], bitorder="little")
        rest = torch.from_numpy(bits)[: out.numel() - 8 * whole]
        out[8 * whole :] = torch.where(rest.bool(), scale, -scale)


def encode_ints(
    x: Tensor, block: int, limit: int, seed: int | None, scales: Tensor, codes: Tensor
) -> None:
    """As reference.encode_ints."""
    most = np.float32(limit)
    for part, rows in rows_of(x.numel(), block):
        grid = padded(x.numpy()[part], block)
        short = codes.numpy()[part]
        out = short if short.size == grid.size else np.empty(grid.size, np.int8)
        bits, scale = grid.view(np.int32), scales.numpy()[rows]
        small, raw = out.reshape(grid.shape), scale.view(np.int32)
        if seed is None:
            loops.round_to_nearest(grid, bits, most, scale, raw, small)
        else:
            start = np.uint32(hash_start(seed, part.start))
            loops.round_at_random(grid, bits, most, start, scale, raw, small)
        if out is not short:
            short[:] = out[: short.size]


def decode_ints(codes: Tensor, scales: Tensor, block: int, out: Tensor) -> None:
    """As reference.decode_ints."""
    for part, rows in rows_of(out.numel(), block):
        count = rows.stop - rows.start
        loops.scale_back(
            codes.numpy()[part].reshape(count, -1),
            scales.numpy()[rows],
            out.numpy()[part].reshape(count, -1),
        )


def pack_nibbles(codes: Tensor, out: Tensor) -> None:
    """As reference.pack_nibbles."""
    whole = codes.numel() // 2
    loops.pack_nibbles(codes.numpy(), out.numpy()[:whole])
    if whole < out.numel():
        out[whole] = int(codes[-1]) & 15


def unpack_nibbles(packed: Tensor, out: Tensor) -> None:
    """As reference.unpack_nibbles."""
    whole = out.numel() // 2
    loops.unpack_nibbles(packed.numpy()[:whole], out.numpy())
    if whole < packed.numel():
        out[-1] = ((int(packed[-1]) & 15) ^ 8) - 8


def encode_fp8(x: Tensor, block: int, form: Fp8Format, codes: Tensor, exponents: Tensor) -> None:
    """As reference.encode_fp8."""
    for part, rows in rows_of(x.numel(), block):
        grid = x.numpy()[part].reshape(rows.stop - rows.start, -1)
        loops.encode_fp8(
            grid,
            grid.view(np.int32),
            form.mantissa_bits,
            form.bias,
            codes.numpy()[part].reshape(grid.shape),
            exponents.numpy()[rows],
        )


def decode_fp8(codes: Tensor, exponents: Tensor, block: int, form: Fp8Format, out: Tensor) -> None:
    """As reference.decode_fp8."""
    for part, rows in rows_of(out.numel(), block):
        grid = out.numpy()[part].reshape(rows.stop - rows.start, -1)
        loops.decode_fp8(
            codes.numpy()[part].reshape(grid.shape),
            exponents.numpy()[rows],
            form.mantissa_bits,
            form.bias,
            grid,
            grid.view(np.int32),
        )


def largest(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As reference.largest; of ties those that come first."""
    places, values = selection.largest(x.numpy(), count)
    return torch.from_numpy(places), torch.from_numpy(values)


def above(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """As reference.above."""
    places, values = selection.above(x.numpy(), threshold)
    return torch.from_numpy(places), torch.from_numpy(values)


def rows_of(numel: int, block: int) -> Iterator[tuple[slice, slice]]:
    """Elements and blocks: of all whole blocks, then of what is left."""
    whole = numel // block
    if whole:
        yield slice(0, whole * block), slice(0, whole)
    if numel % block:
        yield slice(whole * block, numel), slice(whole, whole + 1)


def padded(part: NDArray[Number], block: int) -> NDArray[Number]:
    """Rows of a block each; what a last, shorter one lacks is zero."""
    missing = -part.size % block
    return (np.pad(part, (0, missing)) if missing else part).reshape(-1, block)


def finite_or_nan(scale: float) -> Tensor:
    """As reference.finite_or_nan."""
    narrow = torch.tensor(scale, dtype=torch.float32)
    return narrow if narrow.isfinite() else torch.full_like(narrow, torch.nan)
