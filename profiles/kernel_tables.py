"""The committed tables of kernels: which constants serve a device and dtype, and measured times.

The files under tables/ are made by `python -m claw_plan.profiles.fit kernels.yaml`. A device takes
the table of its own part, else that of its generation, else constants between those of all
generations (`origin` says which); products in fp8 or fp4 without a table take the shape of the
next wider dtype.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from claw_plan.profiles import catalogue
from claw_plan.profiles.attention_cost import AttentionShape
from claw_plan.profiles.cluster import Device
from claw_plan.profiles.gemm_cost import GemmShape, Residual, factor_bytes, operand_bytes

FOLDER = Path(__file__).with_name("tables")

OWN, GENERATION, OTHER = "own", "generation", "other"

TABLES: Mapping[str, Mapping[str, str]] = {
    "a100-pcie-80gb": {"bfloat16": "simumax", "float32": "neusight"},
    "a100-pcie-40gb": {"float32": "neusight"},
    "h100-sxm-80gb": {"bfloat16": "xla", "float32": "neusight"},
    "b200-sxm-180gb": {"bfloat16": "simumax", "float8": "xla"},
    "v100-sxm-32gb": {"float32": "neusight"},
    "t4": {"float32": "neusight"},
    "l4": {"float32": "neusight"},
}
"""The source that planning follows, by part and dtype. On B200 SimuMax's products sustain the rate
of training and XLA's do not: at the higher clocks of short runs idle processors cost more (with
the former, 47 published B200 and GB200 runs left out by groups are 4.7 % off, with the latter
5.2 %).
H100's fp8 table is above the part's peak in places and fits no smooth form; XLA's second run on
H100 used kernels 1.4 times slower than its first."""

CONSTANTS_ONLY = frozenset({"b200-sxm-180gb/bfloat16/simumax"})
"""Tables of which only the constants count: it mixes sessions at clocks 1.3 times apart, the small
shapes in the faster, and so do its residual and single times."""

CHOSEN_TABLES = frozenset(
    f"{part}/{dtype}/{source}" for part, some in TABLES.items() for dtype, source in some.items()
)

TIMED_TABLES = CHOSEN_TABLES - CONSTANTS_ONLY
"""Tables whose measured times are kept."""

_GENERATIONS = {
    "a100-pcie-80gb": ("a100", "a800"),
    "h100-sxm-80gb": ("h100", "h200", "h800", "h20", "gh200"),
    "b200-sxm-180gb": ("b200", "gb200", "b300", "gb300"),
    "v100-sxm-32gb": ("v100",),
    "t4": ("t4",),
    "l4": ("l4",),
}
"""The part whose tables a generation follows, and how its devices' names begin."""

_ATTENTION = {"a100-pcie-80gb": "a100", "h100-sxm-80gb": "h100", "b200-sxm-180gb": "b200"}

_WIDER = {"float4": "float8", "float8": "bfloat16", "float64": "float32", "float16": "bfloat16"}

_HOPPER_EXPONENTIALS = 35.0
"""See `fit.attention.EXPONENTIALS`: SimuMax has no H100, whose other constants are taken halfway
between A100's and B200's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenShape:
    """The constants that serve a device: `dtype` is that of their table, `origin` its relation."""

    shape: GemmShape
    dtype: str
    origin: str


@cache
def gemm_shapes() -> Mapping[str, GemmShape]:
    """All tables of products, by '<part>/<dtype>/<source>'."""
    return {name: _gemm(fields) for name, fields in _read("gemm_shapes.json")["tables"].items()}


@cache
def gemm_shape_of(device_name: str, dtype: str) -> ChosenShape:
    """The constants for products in `dtype` on the device."""
    part, origin = part_of(device_name)
    wanted = "bfloat16" if dtype == "float16" else dtype
    for owner, relation in ((device_name, OWN), (part, origin)):
        source = TABLES.get(owner, {}).get(wanted)
        if source is not None:
            name = f"{owner}/{wanted}/{source}"
            shape = gemm_shapes()[name]
            if name in CONSTANTS_ONLY:
                shape = dataclasses.replace(shape, residual=Residual())
            return ChosenShape(shape=shape, dtype=wanted, origin=relation)
    wider = _WIDER.get(wanted)
    if wider is not None:
        return gemm_shape_of(device_name, wider)
    known = "float32" if wanted == "float32" else "bfloat16"
    return ChosenShape(shape=_average(known), dtype=known, origin=OTHER)


def part_of(device_name: str) -> tuple[str, str]:
    """The part whose tables serve a device, '' without one, and how it is related."""
    for part, prefixes in _GENERATIONS.items():
        if device_name.partition("-")[0] in prefixes:
            return part, OWN if part == device_name else GENERATION
    return "", OTHER


@cache
def _average(dtype: str) -> GemmShape:
    """The median of each constant over the parts, without residual."""
    shapes = [gemm_shapes()[name] for name in sorted(CHOSEN_TABLES) if f"/{dtype}/" in name]
    names = (
        *("flops_per_s", "ramp", "partial_wave", "square", "narrow", "small", "overhead_s"),
        *("memory_share", "extra_share", "spread", "spread_per_octave"),
    )
    middle = {name: statistics.median(getattr(s, name) for s in shapes) for name in names}
    return GemmShape(table=f"average/{dtype}", source="median of parts", **middle)


@cache
def attention_shape_of(device_name: str) -> tuple[AttentionShape, str]:
    """The constants for flash attention on the device, and their origin."""
    part, origin = part_of(device_name)
    if part in _ATTENTION:
        return _attention_shapes()[_ATTENTION[part]], origin
    return _attention_shapes()["a100"], OTHER


@cache
def _attention_shapes() -> Mapping[str, AttentionShape]:
    shapes = {}
    for name, fields in _read("attention_shapes.json")["tables"].items():
        shapes[name] = AttentionShape(**_without(fields, "left_out"))
    ampere, blackwell = shapes["a100"], shapes["b200"]
    names = ("forward", "backward", "forward_tail", "backward_tail", "spread")
    middle = {name: (getattr(ampere, name) + getattr(blackwell, name)) / 2 for name in names}
    shapes["h100"] = dataclasses.replace(
        ampere, table="h100", exponentials=_HOPPER_EXPONENTIALS, **middle
    )
    return shapes


@cache
def _times() -> Mapping[str, Mapping[tuple[int, ...], float]]:
    tables: dict[str, dict[tuple[int, ...], float]] = {}
    with (FOLDER / "gemm_times.csv").open(encoding="utf-8") as file:
        for line in list(file)[2:]:
            name, *numbers = line.split(",")
            values = [int(number) for number in numbers]
            tables.setdefault(name, {})[tuple(values[:-1])] = values[-1] * 1e-9
    return tables


def measured_s(table: str, dims: tuple[int, int, int, int], extra_bytes: float) -> float | None:
    """Seconds of exactly this product in the table; None where it was not measured.

    A product and its transpose count as the same.
    """
    times = _times().get(table)
    if times is None:
        return None
    batch, m, n, k = dims
    extra = round(extra_bytes / (batch * m * n))
    found = times.get((batch, m, n, k, extra))
    return times.get((batch, n, m, k, extra)) if found is None else found


def measured_ratio(
    shape: GemmShape, dims: tuple[int, int, int, int], extra_bytes: float
) -> float | None:
    """How much longer exactly this product took in the shape's table than the shape says."""
    seconds = measured_s(shape.table, dims, extra_bytes)
    if seconds is None:
        return None
    return seconds / table_seconds(shape, dims, extra_bytes)


def table_seconds(
    shape: GemmShape, dims: tuple[int, int, int, int], extra_bytes: float = 0.0
) -> float:
    """What the shape says of a product under its table's conditions: part, clocks, timing."""
    part, dtype, _ = shape.table.split("/")
    device = _device(part)
    time = shape.time(
        device.processors,
        dims,
        memory_bytes_per_s=device.memory_bytes_per_s,
        operand_bytes=operand_bytes(factor_bytes(dtype.partition("-")[0]), *dims),
        extra_bytes=extra_bytes,
    )
    return shape.overhead_s + time.seconds


@cache
def _device(name: str) -> Device:
    return catalogue.device(name)


def _read(name: str) -> Any:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def _gemm(fields: Mapping[str, Any]) -> GemmShape:
    grid = fields["residual"]
    residual = Residual(x0=grid["x0"], y0=grid["y0"], rows=tuple(map(tuple, grid["rows"])))
    plain = _without(fields, "left_out", "residual", "domain")
    return GemmShape(residual=residual, domain=tuple(fields["domain"]), **plain)


def _without(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}
