"""Codecs with few bits an element and a scale for each block: `fp8`, `int8` and `int4`.

With a = the largest magnitude of a block and B elements in it, the error of an element is at most

    int8, int4   half a step: a/(2·127) and a/(2·7); a whole step at random rounding
    fp8 e4m3     2^-4 |x| or, of small ones, 2^-17 a; e5m2 2^-3 |x| or 2^-31 a

and so, as the largest itself is exact in the integer formats,

    |x - decode(encode(x))|² <= (B - 1)/(4·127²) |x|²   (int8;  (B - 1)/(4·7²) of int4)

Blocks keep one large element from costing the precision of all. Never sum in these formats:
decode, add in fp32, encode again. Source: algebra, and OCP's OFP8 (2023) for fp8. The scale of fp8
is a power of two in a byte, as in OCP's Microscaling formats (MX, 2023, section 5.2), but rounded
up, where MX's rule cuts off what lies between 1.75 and 2 times a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from claw_plan.kernels import compiled_feedback
from claw_plan.kernels.backend import backend_of
from claw_plan.kernels.codec_base import Codec, lie_in_cpu_floats, typed
from claw_plan.kernels.reference import E4M3, E5M2, Fp8Format

SCALE_BYTES = 4


class IntBlocks(Codec):
    """Codes are all fp32 scales, then all small numbers."""

    __slots__ = ()
    limit: ClassVar[int]
    """Codes are -limit to limit."""
    block: int
    rounding: Literal["nearest", "stochastic"]
    seed: int

    @property
    def contraction(self) -> float | None:
        """From the squares of half steps; None where that is no less than one."""
        nearest = self.rounding == "nearest"
        halves = self.block - 1 if nearest else 4 * self.block
        bound = halves / (4 * self.limit**2)
        # The scale and the quotient are rounded to fp32.
        return bound * (1 + 1e-4) if bound < 0.9 else None

    def encode_fused(self, x: Tensor, before: Tensor, rest: Tensor) -> tuple[Tensor, bool] | None:
        """As of any codec, in one pass on the CPU."""
        if not x.numel() or not lie_in_cpu_floats(x, before, rest):
            return None
        codes = self._buffer(x)
        scales, small = self._scales(codes, x.numel())
        finite = compiled_feedback.encode_ints(
            *(x, before, rest, self.block, self.limit, self._seed, scales, small)
        )
        return codes, finite

    @property
    def _seed(self) -> int | None:
        """None: to the nearest."""
        return None if self.rounding == "nearest" else self.seed

    def _scales(self, codes: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """The scales, and the bytes after them."""
        end = SCALE_BYTES * -(-numel // self.block)
        return typed(codes[:end], torch.float32), codes[end : self._payload_bytes(numel)]

    def _small(self, x: Tensor, scales: Tensor, out: Tensor) -> None:
        backend_of(x).encode_ints(x, self.block, self.limit, self._seed, scales, out)

    def _large(self, small: Tensor, scales: Tensor, out: Tensor) -> None:
        backend_of(small).decode_ints(small, scales, self.block, out)


@dataclass(frozen=True, slots=True)
class Int8Blocks(IntBlocks):
    """A byte an element."""

    name: ClassVar[str] = "int8"
    limit: ClassVar[int] = 127
    block: int = 256
    rounding: Literal["nearest", "stochastic"] = "nearest"
    seed: int = 0
    """Of random rounding; another one each step makes the roundings of steps independent."""

    def _payload_bytes(self, numel: int) -> int:
        return numel + SCALE_BYTES * -(-numel // self.block)

    def _encode(self, x: Tensor) -> Tensor:
        codes = self._buffer(x)
        scales, rest = self._scales(codes, x.numel())
        self._small(x, scales, rest.view(torch.int8))
        return codes

    def _decode(self, codes: Tensor, out: Tensor) -> None:
        scales, rest = self._scales(codes, out.numel())
        self._large(rest.view(torch.int8), scales, out)


@dataclass(frozen=True, slots=True)
class Int4Blocks(IntBlocks):
    """Half a byte an element, two's complement, the first in the low half."""

    name: ClassVar[str] = "int4"
    limit: ClassVar[int] = 7
    block: int = 64
    rounding: Literal["nearest", "stochastic"] = "nearest"
    seed: int = 0

    def _payload_bytes(self, numel: int) -> int:
        return -(-numel // 2) + SCALE_BYTES * -(-numel // self.block)

    def _encode(self, x: Tensor) -> Tensor:
        codes = self._buffer(x)
        scales, rest = self._scales(codes, x.numel())
        small = torch.empty(x.numel(), dtype=torch.int8, device=x.device)
        self._small(x, scales, small)
        backend_of(x).pack_nibbles(small, rest)
        return codes

    def _decode(self, codes: Tensor, out: Tensor) -> None:
        scales, rest = self._scales(codes, out.numel())
        small = torch.empty(out.numel(), dtype=torch.int8, device=codes.device)
        backend_of(codes).unpack_nibbles(rest, small)
        self._large(small, scales, out)


@dataclass(frozen=True, slots=True)
class Fp8Blocks(Codec):
    """Codes are all fp8 numbers, then the exponents of all blocks, a byte each."""

    name: ClassVar[str] = "fp8"
    format: Literal["e4m3", "e5m2"] = "e4m3"
    block: int = 128

    @property
    def contraction(self) -> float | None:
        """Half an ulp of each, and half of the least step for those below the normal numbers."""
        form = self._form
        least = 2.0 ** (1 - form.bias - form.mantissa_bits - form.largest_exponent)
        return float(4.0 ** -(form.mantissa_bits + 1) + self.block * least**2)

    @property
    def _form(self) -> Fp8Format:
        return E4M3 if self.format == "e4m3" else E5M2

    def _payload_bytes(self, numel: int) -> int:
        return numel + -(-numel // self.block)

    def encode_fused(self, x: Tensor, before: Tensor, rest: Tensor) -> tuple[Tensor, bool] | None:
        """As of any codec, in one pass on the CPU."""
        if not x.numel() or not lie_in_cpu_floats(x, before, rest):
            return None
        codes, numel = self._buffer(x), x.numel()
        exponents = codes[numel : self._payload_bytes(numel)]
        finite = compiled_feedback.encode_fp8(
            *(x, before, rest, self.block, self._form, codes[:numel], exponents)
        )
        return codes, finite

    def _encode(self, x: Tensor) -> Tensor:
        codes = self._buffer(x)
        numel = x.numel()
        exponents = codes[numel : self._payload_bytes(numel)]
        backend_of(x).encode_fp8(x, self.block, self._form, codes[:numel], exponents)
        return codes

    def _decode(self, codes: Tensor, out: Tensor) -> None:
        numel = out.numel()
        exponents = codes[numel : self._payload_bytes(numel)]
        backend_of(codes).decode_fp8(codes[:numel], exponents, self.block, self._form, out)
