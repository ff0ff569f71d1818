"""`GemmShape`: how the time of a matrix product grows with its shape, in one dtype on one part.

    area    = min over tiles of paid(tiles) * tile area / tile efficiency
    paid    = w * whole waves + (1 - w) * max(tiles, processors)
    compute = 2 area (k + c)/R * exp(r(log2(area/processors), log2 k))
    time    = t0 + (compute^4 + memory^4)^(1/4) + x * extra/W,   memory = operands/(s W)

A kernel cuts the output into tiles, and processors take them in waves; of a last, partly filled
wave the share w is paid. c is the depth at which the rate halves, r a smooth residual on a grid,
R the FLOP/s of endless products, W the bytes/s of memory, `extra` bytes beyond the operands (fp32
accumulation), of which x do not hide. The constants are fitted to measured tables by `fit.gemm`;
`kernel_tables` holds them. Time never falls as m, n or k grow: every part is monotone, and the
slopes of r are limited so that they cannot outweigh those of area and k.

Shape and level are apart: R of a table is that of its short runs, at high clocks; training asks
with the device's sustained rate, and only `compute` scales with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

TILES = (
    (256, 128, "large"),
    (128, 256, "large"),
    (128, 128, "square"),
    (128, 64, "narrow"),
    (64, 128, "narrow"),
    (64, 64, "small"),
)
"""Output tiles that a kernel may use, and the name of their efficiency ('large': 1)."""

BLEND = 4
"""Power of the smooth maximum of compute and memory: at equal parts 19 % above either."""


_FACTOR_BYTES = {"float64": 8.0, "float32": 4.0, "tfloat32": 4.0, "float8": 1.0, "float4": 0.5}


def factor_bytes(dtype: str) -> float:
    """Bytes of an element of the factors; 2 where the dtype says nothing else."""
    return _FACTOR_BYTES.get(dtype, 2.0)


def operand_bytes(element_bytes: float, batch: Any, m: Any, n: Any, k: Any) -> Any:
    """Bytes of factors and result, once each; results of narrow factors are kept in 16 bit."""
    return batch * (element_bytes * (m * k + k * n) + max(2.0, element_bytes) * m * n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """ln of a factor, bilinear between whole `log2` values, constant outside the grid.

    `rows[i][j]` belongs to log2(area per processor) = x0 + i and log2 k = y0 + j.
    """

    x0: int = 0
    y0: int = 0
    rows: tuple[tuple[float, ...], ...] = ((0.0,),)

    def __call__(self, x: float, y: float) -> float:
        """The value at log2(area per processor) x and log2 k y."""
        i, u = _cell(x - self.x0, len(self.rows))
        j, v = _cell(y - self.y0, len(self.rows[0]))
        low, high = self.rows[i], self.rows[i + 1 if u else i]
        right = j + 1 if v else j
        return (low[j] * (1 - v) + low[right] * v) * (1 - u) + (
            high[j] * (1 - v) + high[right] * v
        ) * u


def _cell(place: float, count: int) -> tuple[int, float]:
    if place <= 0:
        return 0, 0.0
    if place >= count - 1:
        return count - 1, 0.0
    index = int(place)
    return index, place - index


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTime:
    """Seconds of a product without `overhead_s`, and the share of that which scales with the rate.

    `beyond` counts the octaves by which the shape lies outside those the constants rest on.
    """

    seconds: float
    compute_share: float
    beyond: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmShape:
    """Constants of one table. See the module for their meaning.

    `domain` is the range of log2(area per processor) and of log2 k that was measured. `spread` is
    the relative error that two in three shapes left out of the fit stay below; it grows by
    `spread_per_octave` outside the domain.
    """

    table: str
    flops_per_s: float
    ramp: float
    partial_wave: float
    square: float
    narrow: float
    small: float
    overhead_s: float = 0.0
    memory_share: float = 0.85
    extra_share: float = 1.0
    residual: Residual = field(default_factory=Residual)
    domain: tuple[float, float, float, float] = (-math.inf, math.inf, -math.inf, math.inf)
    spread: float = 0.0
    spread_per_octave: float = 0.0
    source: str = ""

    def area(self, processors: int, batch: int, m: int, n: int) -> float:
        """Elements of output that are paid for, in units of the best tile's."""
        best = math.inf
        wave, rest = self.partial_wave, 1.0 - self.partial_wave
        for rows, columns, name in TILES:
            efficiency = 1.0 if name == "large" else getattr(self, name)
            tiles = batch * -(-m // rows) * -(-n // columns)
            full = -(-tiles // processors) * processors
            paid = wave * full + rest * max(tiles, processors)
            best = min(best, paid * rows * columns / efficiency)
        return best

    def time(
        self,
        processors: int,
        dims: tuple[int, int, int, int],
        *,
        memory_bytes_per_s: float,
        operand_bytes: float,
        extra_bytes: float = 0.0,
        flops_per_s: float | None = None,
        ramp_scale: float = 1.0,
        factor: float = 1.0,
        blend: float = BLEND,
    ) -> GemmTime:
        """Time of `batch` products (m, k) x (k, n), the dims (batch, m, n, k).

        Args:
            processors: Of the device, which take one tile each.
            dims: All at least 1.
            memory_bytes_per_s: Of the data sheet.
            operand_bytes: Both factors and the result, once each.
            extra_bytes: What the kernel reads and writes besides.
            flops_per_s: The level; the table's own when None.
            ramp_scale: Of the ramp, at a dtype with another rate.
            factor: By which `compute` is longer than the formula says.
            blend: Power of the smooth maximum of compute and memory.
        """
        batch, m, n, k = dims
        area = self.area(processors, batch, m, n)
        x, y = math.log2(area / processors), math.log2(k)
        compute_s = (
            factor * 2.0 * area * (k + self.ramp * ramp_scale) / (flops_per_s or self.flops_per_s)
        )
        compute_s *= math.exp(self.residual(x, y))
        memory_s = operand_bytes / (self.memory_share * memory_bytes_per_s)
        main_s = (compute_s**blend + memory_s**blend) ** (1 / blend)
        extra_s = self.extra_share * extra_bytes / memory_bytes_per_s
        seconds = main_s + extra_s
        x_low, x_high, y_low, y_high = self.domain
        return GemmTime(
            seconds=seconds,
            compute_share=main_s / seconds * (compute_s / main_s) ** blend,
            beyond=max(x_low - x, x - x_high, 0.0) + max(y_low - y, y - y_high, 0.0),
        )
