"""The primitive passes of the codecs for the CPU, compiled by numba: as fast as memory.

Torch has no operation that packs bits, and its reductions over short rows are slow on the CPU; a
plain loop that the compiler turns into vector instructions is several times faster. Each function
does what the one of its name in reference.py does; the loops are in compiled_loops.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from claw_plan.kernels import compiled_loops as loops
from claw_plan.kernels.reference import Fp8Format, hash_start

SAMPLES = 1 << 14
"""Of the magnitudes, to guess where the largest begin."""
SCAN_WIDTH = 32
"""Elements that are skipped at once where none of them is large."""


def mean_abs(x: Tensor) -> Tensor:
    """As reference.mean_abs."""
    return _finite_or_nan(loops.sum_abs(x.numpy()) / x.numel())


def root_mean_square(x: Tensor) -> Tensor:
    """As reference.root_mean_square."""
    return _finite_or_nan(math.sqrt(loops.sum_square(x.numpy()) / x.numel()))


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
    for part, rows in _rows(x.numel(), block):
        grid = x.numpy()[part].reshape(rows.stop - rows.start, -1)
        out = codes.numpy()[part].reshape(grid.shape)
        bits, scale = grid.view(np.int32), scales.numpy()[rows]
        raw = scale.view(np.int32)
        if seed is None:
            loops.round_to_nearest(grid, bits, most, scale, raw, out)
        else:
            start = np.uint32(hash_start(seed, part.start))
            loops.round_at_random(grid, bits, most, start, scale, raw, out)


def decode_ints(codes: Tensor, scales: Tensor, block: int, out: Tensor) -> None:
    """As reference.decode_ints."""
    for part, rows in _rows(out.numel(), block):
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
    for part, rows in _rows(x.numel(), block):
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
    for part, rows in _rows(out.numel(), block):
        grid = out.numpy()[part].reshape(rows.stop - rows.start, -1)
        loops.decode_fp8(
            codes.numpy()[part].reshape(grid.shape),
            exponents.numpy()[rows],
            form.mantissa_bits,
            form.bias,
            grid,
            grid.view(np.int32),
        )


def largest(x: Tensor, count: int) -> Tensor:
    """As reference.largest.

    A sample tells about where the largest magnitudes begin; what lies above is collected in one
    pass and the exact choice made among it. A sample that misled costs a second, full pass.
    """
    numel = x.numel()
    bits = x.numpy().view(np.int32)
    room = 3 * count + SAMPLES // 16
    if numel < 4 * SAMPLES or room > numel // 8:
        return _largest_of(_magnitudes(bits), count)
    sample = _magnitudes(bits[:: numel // SAMPLES])
    wanted = -(-2 * count * sample.size // numel) + 8
    limit = np.partition(sample, sample.size - wanted)[sample.size - wanted]
    candidates = _at_least(bits, limit, room)
    if not count <= candidates.size < room:  # as many as there is room: more may have been left
        return _largest_of(_magnitudes(bits), count)
    chosen = _largest_of(_magnitudes(bits[candidates]), count)
    return torch.from_numpy(candidates)[chosen].long()


def above(x: Tensor, threshold: float) -> Tensor:
    """As reference.above."""
    bits = x.numpy().view(np.int32)
    limit = np.float32(threshold).view(np.int32) + np.int32(1)
    count = loops.count_above(bits, limit)
    return torch.from_numpy(_at_least(bits, limit, count)).long()


def _magnitudes(bits: NDArray[np.int32]) -> NDArray[np.int32]:
    """Whole numbers that are ordered as the magnitudes, NaN above all."""
    return bits & loops.MAGNITUDE


def _largest_of(keys: NDArray[np.int32], count: int) -> Tensor:
    edge = np.partition(keys, keys.size - count)[keys.size - count]
    chosen = np.flatnonzero(keys >= edge)
    surplus = chosen.size - count
    if surplus:
        last_ties = np.flatnonzero(keys[chosen] == edge)[-surplus:]
        chosen = np.delete(chosen, last_ties)
    return torch.from_numpy(chosen)


def _at_least(bits: NDArray[np.int32], limit: np.int32, room: int) -> NDArray[np.int32]:
    """The first of them, at most `room`."""
    out = np.empty(room + SCAN_WIDTH, np.int32)
    whole = bits.size // SCAN_WIDTH * SCAN_WIDTH
    found = min(room, loops.collect_above(bits[:whole].reshape(-1, SCAN_WIDTH), limit, out))
    rest = np.flatnonzero(_magnitudes(bits[whole:]) >= limit)[: room - found] + whole
    out[found : found + rest.size] = rest
    return out[: found + rest.size]


def _rows(numel: int, block: int) -> Iterator[tuple[slice, slice]]:
    """Elements and blocks: of all whole blocks, then of what is left."""
    whole = numel // block
    if whole:
        yield slice(0, whole * block), slice(0, whole)
    if numel % block:
        yield slice(whole * block, numel), slice(whole, whole + 1)


def _finite_or_nan(scale: float) -> Tensor:
    narrow = torch.tensor(scale, dtype=torch.float32)
    return narrow if narrow.isfinite() else torch.full_like(narrow, torch.nan)
