"""kernels.yaml to the committed tables of kernels: shapes of products and attention, and times.

`gemm_shapes.json` and `attention_shapes.json` hold constants, residuals and the errors at shapes
left out; `gemm_times.csv` the measured times of the tables that planning uses, for products of
exactly these shapes. `profiles.kernel_tables` reads all three.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from claw_plan.profiles import catalogue
from claw_plan.profiles.fit.attention import attention_rows, fit_attention
from claw_plan.profiles.fit.gemm import GemmRow, fit_shape
from claw_plan.profiles.fit.kernel_rows import TABLE_SOURCES, TableKey, gemm_tables
from claw_plan.profiles.fit.registry import DataFile, Fitter
from claw_plan.profiles.gemm_cost import factor_bytes
from claw_plan.profiles.kernel_tables import FOLDER, TIMED_TABLES

COMMAND = "python -m claw_plan.profiles.fit"

ATTENTION_GPUS = {"a100": ("A100-PCIe-80GB", "a100-pcie-80gb"), "b200": ("B200", "b200-sxm-180gb")}
"""Generation to SimuMax's GPU and the catalogue's device."""

_TABLES = ("xla_matmul_table", "simumax_efficiency", "neusight_linear_fp32")


def is_kernel_file(file: DataFile) -> bool:
    """Whether the file has a table of products."""
    return isinstance(file.data, Mapping) and any(name in file.data for name in _TABLES)


def fit_kernels(files: Sequence[DataFile]) -> dict[str, str]:
    """The three files, made from all tables of the data files together."""
    data = _joined(files)
    made_from = {"made_by": COMMAND, "from": [file.provenance for file in files]}
    tables = gemm_tables(data)
    gemms = {str(key): _gemm(key, rows) for key, rows in tables.items()}
    attention = {
        generation: _attention(data, generation)
        for generation, (gpu, _) in ATTENTION_GPUS.items()
        if attention_rows(data, gpu)
    }
    return {
        "gemm_shapes.json": _json({**made_from, "tables": gemms}),
        "attention_shapes.json": _json({**made_from, "tables": attention}),
        "gemm_times.csv": _times(tables, "; ".join(made_from["from"])),
    }


def _joined(files: Sequence[DataFile]) -> dict[str, dict[str, list[Any]]]:
    data: dict[str, dict[str, list[Any]]] = defaultdict(lambda: {"rows": []})
    for file in files:
        for name in _TABLES:
            data[name]["rows"] += file.data.get(name, {}).get("rows", [])
    return data


def _gemm(key: TableKey, rows: Sequence[GemmRow]) -> dict[str, Any]:
    shape, left_out = fit_shape(
        rows,
        catalogue.device(key.part),
        factor_bytes(key.dtype.partition("-")[0]),
        table=str(key),
        source=TABLE_SOURCES[key.source.partition("-")[0]],
    )
    return dataclasses.asdict(shape) | {"left_out": _summary(left_out.errors)}


def _attention(data: Mapping[str, Any], generation: str) -> dict[str, Any]:
    gpu, device = ATTENTION_GPUS[generation]
    shape, errors = fit_attention(
        attention_rows(data, gpu),
        catalogue.device(device).processors,
        generation=generation,
        source=TABLE_SOURCES["simumax"],
    )
    return dataclasses.asdict(shape) | {"left_out": _summary(errors)}


def _summary(errors: Sequence[float]) -> dict[str, float]:
    """Of relative errors at shapes left out, in percent."""
    absolute = np.abs(errors)
    return {
        "rows": len(errors),
        "median_pct": round(100 * float(np.median(absolute)), 2),
        "mape_pct": round(100 * float(np.mean(absolute)), 2),
        "bias_pct": round(100 * float(np.median(errors)), 2),
    }


def _times(tables: Mapping[TableKey, Sequence[GemmRow]], source: str) -> str:
    """One line a shape: the median of its rows, in ns."""
    lines = [f"# {COMMAND}: {source}", "table,batch,m,n,k,extra_bytes_per_output,ns"]
    for key, rows in tables.items():
        if str(key) not in TIMED_TABLES:
            continue
        same: dict[tuple[int, ...], list[float]] = defaultdict(list)
        for row in rows:
            batch, m, n, _ = row.dims
            same[(*row.dims, round(row.extra_bytes / (batch * m * n)))].append(row.seconds)
        for shape, seconds in sorted(same.items()):
            numbers = ",".join(map(str, shape))
            lines.append(f"{key},{numbers},{round(statistics.median(seconds) * 1e9)}")
    return "\n".join(lines) + "\n"


def _json(content: Mapping[str, Any]) -> str:
    """Indented, but for lists of numbers, which stay on one line."""
    return _indented(content, "") + "\n"


def _indented(value: Any, margin: str) -> str:
    inner = margin + " "
    if isinstance(value, Mapping) and value:
        items = (f"{inner}{json.dumps(k)}: {_indented(v, inner)}" for k, v in value.items())
        return "{\n" + ",\n".join(items) + f"\n{margin}}}"
    if isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple):
        return "[\n" + ",\n".join(inner + json.dumps(row) for row in value) + f"\n{margin}]"
    return json.dumps(value)


FITTER = Fitter(kind="kernels", recognises=is_kernel_file, fit=fit_kernels, folder=Path(FOLDER))
