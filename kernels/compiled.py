"""The primitive passes of the codecs for the CPU, compiled by numba: as fast as memory.

Torch has no operation that packs bits, and its reductions over short rows are slow on the CPU; a
plain loop that the compiler turns into vector instructions is several times faster. Each function
does what the one of its name in reference.py does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def _compiled(function: Function) -> Function:
    """Compiles; sums may be taken in any order, which is what lets them use vectors."""
    njit: Any = numba.njit  # its types leave out these options
    options = {"fastmath": {"reassoc"}, "error_model": "numpy"}
    try:
        return cast(Function, njit(cache=True, **options)(function))
    except RuntimeError:  # numba found no folder it may write to
        return cast(Function, njit(**options)(function))


def mean_abs(x: Tensor) -> Tensor:
    """As reference.mean_abs."""
    return _finite_or_nan(_sum_abs(x.numpy()) / x.numel())


def root_mean_square(x: Tensor) -> Tensor:
    """As reference.root_mean_square."""
    return _finite_or_nan(math.sqrt(_sum_square(x.numpy()) / x.numel()))


def pack_signs(x: Tensor, out: Tensor) -> None:
    """As reference.pack_signs."""
    whole = x.numel() // 8
    _pack_signs(x.numpy(), out.numpy()[:whole])
    if whole < out.numel():
        rest = (x[8 * whole :] >= 0).numpy()
        out[whole] = int(np.packbits(rest, bitorder="little")[0])


def unpack_signs(codes: Tensor, scale: Tensor, out: Tensor) -> None:
    """As reference.unpack_signs."""
    whole = out.numel() // 8
    _unpack_signs(codes.numpy()[:whole], np.float32(scale.item()), out.numpy())
    if whole < codes.numel():
        bits = np.unpackbits(codes.numpy()[whole:], bitorder="little")
        rest = torch.from_numpy(bits)[: out.numel() - 8 * whole]
        out[8 * whole :] = torch.where(rest.bool(), scale, -scale)


@_compiled
def _sum_abs(x: Floats) -> float:
    total = 0.0
    for value in x:
        total += abs(np.float64(value))
    return total


@_compiled
def _sum_square(x: Floats) -> float:
    total = 0.0
    for value in x:
        total += np.float64(value) * np.float64(value)
    return total


@_compiled
def _pack_signs(x: Floats, out: Bytes) -> None:
    for i in range(out.size):
        byte = np.uint8(0)
        for j in range(8):
            byte |= np.uint8(x[8 * i + j] >= 0) << np.uint8(j)
        out[i] = byte


@_compiled
def _unpack_signs(codes: Bytes, scale: np.float32, out: Floats) -> None:
    for i in range(codes.size):
        for j in range(8):
            out[8 * i + j] = scale if (codes[i] >> np.uint8(j)) & 1 else -scale


def _finite_or_nan(scale: float) -> Tensor:
    narrow = torch.tensor(scale, dtype=torch.float32)
    return narrow if narrow.isfinite() else torch.full_like(narrow, torch.nan)
