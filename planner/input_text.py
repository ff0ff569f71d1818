"""`--inputs`: from the text `idx=int64[B,1024]<50304` to random tensors of that description."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from claw_plan.profiles.errors import InputError, near_matches

_INTEGERS = ("bool", "uint8", "int8", "int16", "int32", "int64")
_FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64")
DTYPES = {name: getattr(torch, name) for name in (*_INTEGERS, *_FLOATS)}

LARGEST_SIZE = 10**9
"""No dimension of an input is larger; example batches are made of real tensors."""

_SPEC = re.compile(
    r"(?P<name>[A-Za-z_]\w*)=(?P<dtype>\w+)\[(?P<dims>[^\]]*)\](?:<(?P<bound>\d+(\.\d+)?))?"
)
_EXAMPLE = 'as in --inputs "idx=int64[B,1024]<50304 targets=int64[B,1024]<50304"'


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """One input: its shape with 'B' (batch) first, and an exclusive upper bound of its values."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    bound: float | None = None

    @property
    def seq_len(self) -> int | None:
        """The second dimension of [B, seq] integers and [B, seq, features] floats."""
        floating = DTYPES[self.dtype].is_floating_point
        if len(self.shape) == (3 if floating else 2):
            return int(self.shape[1])
        return None


def parse_inputs(text: str) -> tuple[InputSpec, ...]:
    """The inputs the text describes; raises InputError saying which part is wrong, and why."""
    parts = re.sub(r"\s*,\s*(?=[^\[\]]*\])", ",", text).split()
    if not parts:
        raise InputError(f"--inputs is empty; name at least one input, {_EXAMPLE}")
    specs = tuple(_parse_part(part) for part in parts)
    names = [spec.name for spec in specs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"--inputs names {twice!r} twice")
    return specs


def _parse_part(part: str) -> InputSpec:
    match = _SPEC.fullmatch(part)
    if match is None:
        raise InputError(f"--inputs: {part!r} is not name=dtype[B,size,...]<bound, {_EXAMPLE}")
    dtype = match["dtype"]
    if dtype not in DTYPES:
        raise InputError(
            f"--inputs: unknown dtype {dtype!r} of {match['name']!r}; "
            f"{near_matches(dtype, DTYPES)}"
        )
    dims = [dim.strip() for dim in match["dims"].split(",")]
    if dims[0] != "B" or "B" in dims[1:]:
        raise InputError(
            f"--inputs: the first dimension of {match['name']!r} must be B, the batch, and no "
            f"other, but got [{match['dims']}]"
        )
    if bad := next((dim for dim in dims[1:] if not _is_size(dim)), None):
        raise InputError(f"--inputs: {bad!r} in {part!r} is not a size from 1 to {LARGEST_SIZE}")
    bound = None if match["bound"] is None else float(match["bound"])
    if bound is not None and bound <= 0:
        raise InputError(f"--inputs: the bound of {match['name']!r} must be above 0")
    if bound is not None and bound > 2**62:
        raise InputError(f"--inputs: the bound of {match['name']!r} is more than int64 can hold")
    shape: tuple[int | str, ...] = ("B", *(int(dim) for dim in dims[1:]))
    return InputSpec(name=match["name"], dtype=dtype, shape=shape, bound=bound)


def _is_size(text: str) -> bool:
    return text.isdecimal() and len(text) < 20 and 1 <= int(text) <= LARGEST_SIZE


def random_batch(
    specs: tuple[InputSpec, ...], batch_size: int, seq_len: int | None = None
) -> dict[str, torch.Tensor]:
    """Tensors as described; `seq_len` replaces the sequence dimension wherever it occurs.

    Integers without a bound are 0 or 1, which is within every vocabulary and a legal mask.
    """
    native = next((spec.seq_len for spec in specs if spec.seq_len), None)
    batch = {}
    for spec in specs:
        sizes = [batch_size, *(int(dim) for dim in spec.shape[1:])]
        last = 2 if DTYPES[spec.dtype].is_floating_point else len(sizes)
        if seq_len is not None and native is not None:
            for dim in range(1, min(last, len(sizes))):
                sizes[dim] = seq_len if sizes[dim] == native else sizes[dim]
        batch[spec.name] = _random(spec, sizes)
    return batch


def _random(spec: InputSpec, sizes: list[int]) -> torch.Tensor:
    dtype = DTYPES[spec.dtype]
    if dtype.is_floating_point or dtype.is_complex:
        values = torch.randn(sizes) if spec.bound is None else torch.rand(sizes) * spec.bound
        return values.to(dtype)
    return torch.randint(0, int(spec.bound or 2), sizes).to(dtype)
