"""The tables of kernels.yaml to rows of single kinds of kernels, by part, dtype and source.

Rows that their publisher's peak contradicts are dropped. Where a table holds a shape twice, it is
two runs one after the other with other kernels (H100 in XLA's table: 1.4 times apart); they become
two sources, never a mean.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from claw_plan.profiles.fit.gemm import GemmRow

PARTS = {
    "H100 (sm_90)": "h100-sxm-80gb",
    "B200": "b200-sxm-180gb",
    "A100-PCIe-80GB": "a100-pcie-80gb",
    "A100-PCIE-40GB": "a100-pcie-40gb",
    "A100 80GB PCIe": "a100-pcie-80gb",
    "H100 80GB HBM3": "h100-sxm-80gb",
    "V100-PCIE-32GB": "v100-sxm-32gb",
    "T4": "t4",
    "L4": "l4",
}
"""The catalogue's names of the GPUs of kernels.yaml."""

TABLE_SOURCES = {
    "xla": "github openxla/xla, xla/service/gpu/model/matmul_interpolator_data.h",
    "simumax": "github MooreThreads/SimuMax, configs/system/{a100_pcie,b200_bf16_ceperm}.json",
    "neusight": "github sitar-lab/NeuSight, scripts/asplos/data/dataset/test/linear.csv",
}

_XLA_DTYPES = {
    "bf16xbf16->bf16": ("bfloat16", 0),
    "bf16xbf16->f32": ("bfloat16-float32", 2),
    "f32xf32->f32": ("tfloat32", 0),
}
"""Our name of a product's dtypes, and bytes by which an element of the result is wider than
`operand_bytes` says; the others are fp8. XLA multiplies 'f32' in TF32."""


@dataclass(frozen=True, slots=True, order=True)
class TableKey:
    """A table: products of one dtype, timed on one part by one source."""

    part: str
    dtype: str
    source: str

    def __str__(self) -> str:
        return f"{self.part}/{self.dtype}/{self.source}"


def gemm_tables(data: Mapping[str, Any]) -> dict[TableKey, list[GemmRow]]:
    """All usable products of a kernels.yaml."""
    tables: dict[TableKey, list[GemmRow]] = defaultdict(list)
    for read in (_xla, _simumax, _neusight):
        for key, row in read(data):
            tables[key].append(row)
    return dict(sorted(tables.items()))


def _rows(data: Mapping[str, Any], table: str) -> Iterator[Mapping[str, Any]]:
    for row in data.get(table, {}).get("rows", ()):
        if row["gpu"] in PARTS and "flag" not in row:
            yield row


def _xla(data: Mapping[str, Any]) -> Iterator[tuple[TableKey, GemmRow]]:
    times_seen: dict[Any, int] = defaultdict(int)
    for row in data.get("xla_matmul_table", {}).get("rows", ()):
        shape = (row["gpu"], row["dtype"], row["batch"], row["m"], row["n"], row["k"])
        times_seen[shape] += 1
        if row["gpu"] not in PARTS or "flag" in row:
            continue
        dtype, wider = _XLA_DTYPES.get(row["dtype"], ("float8", 0))
        source = "xla" if times_seen[shape] == 1 else "xla-2"
        extra = wider * row["batch"] * row["m"] * row["n"]
        yield TableKey(PARTS[row["gpu"]], dtype, source), _by_rate(row, extra)


def _simumax(data: Mapping[str, Any]) -> Iterator[tuple[TableKey, GemmRow]]:
    for row in _rows(data, "simumax_efficiency"):
        if row["op"] == "matmul":
            written = 4 if row["out_dtype"] == "fp32" else 2
            touched = written * (2 if row["accumulate"] else 1)
            extra = (touched - 2) * row["batch"] * row["m"] * row["n"]
            yield TableKey(PARTS[row["gpu"]], "bfloat16", "simumax"), _by_rate(row, extra)


def _neusight(data: Mapping[str, Any]) -> Iterator[tuple[TableKey, GemmRow]]:
    for row in _rows(data, "neusight_linear_fp32"):
        seconds = row["time_ms"] / 1e3
        key = TableKey(PARTS[row["gpu"]], "float32", "neusight")
        yield key, GemmRow(dims=_dims(row), seconds=seconds)


def _dims(row: Mapping[str, Any]) -> tuple[int, int, int, int]:
    return int(row["batch"]), int(row["m"]), int(row["n"]), int(row["k"])


def _by_rate(row: Mapping[str, Any], extra_bytes: int) -> GemmRow:
    batch, m, n, k = dims = _dims(row)
    seconds = 2 * batch * m * n * k / (row["tflops"] * 1e12)
    return GemmRow(dims=dims, seconds=seconds, extra_bytes=extra_bytes)
