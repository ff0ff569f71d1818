"""Tables of kernel times, as kernels.yaml, to `KernelRow`s.

A table is a mapping with `rows`; what a row times is told by its keys: m, n, k of a matrix
product, groups of a grouped one, seq_len and head_num of attention. Rates (TFLOP/s) become times
through the same count of operations that made them. Rows of other content, of GPUs that are not
stated, or that their publisher's peak contradicts are listed with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from claw_plan.profiles.cluster import Cluster
from claw_plan.profiles.errors import InputError
from claw_plan.profiles.hardware_text import hardware_of
from claw_plan.profiles.published_fields import BrokenRows, Fields, Row, shown
from claw_plan.profiles.published_rows import KERNELS, KernelRow, NotExpressed, Published
from claw_plan.profiles.units import NS_PER_MS, NS_PER_S, NS_PER_US
from claw_plan.profiles.work import OpWork

_INCREDIBLE = ("above_dense_peak",)
"""Flags that say a figure is no time a kernel took."""

_FACTOR_BYTES = {"float32": 4.0, "tfloat32": 4.0, "float8": 1.0, "float4": 0.5}
_ATTENTION_PHASES = {"sdp_fwd": ("forward", 1.0), "sdp_bwd": ("backward", 2.5)}
"""SimuMax counts the whole square of causal kernels, and five products backward against two
(github MooreThreads/SimuMax; Dao 2022, arXiv 2205.14135)."""


class _CannotRepeat(Exception):
    """Why a sound row cannot be predicted."""


def is_kernels(data: Any) -> bool:
    """Whether the data of a YAML file holds tables of kernel times."""
    if not isinstance(data, Mapping) or not data:
        return False
    tables = [table for table in data.values() if isinstance(table, Mapping) and "rows" in table]
    timed = ("tflops", "time_ms", "time_us", "forward_ms", "fwd_us", "value_ms")
    return any(_first(table) and any(key in _first(table) for key in timed) for table in tables)


def _first(table: Mapping[str, Any]) -> Mapping[str, Any]:
    rows = table["rows"]
    return rows[0] if isinstance(rows, list) and rows and isinstance(rows[0], Mapping) else {}


def read_kernels(path: Path, data: Mapping[str, Any]) -> Published:
    """The rows of a file; raises InputError where every row is broken."""
    rows: list[KernelRow] = []
    others: list[NotExpressed] = []
    broken = BrokenRows()
    for name, table in data.items():
        if not isinstance(table, Mapping) or not isinstance(table.get("rows"), list):
            raise Row(path, (name,), name).fail("rows", "a table needs a list of rows")
        for index, values in enumerate(table["rows"]):
            with broken.caught(f"{name}[{index}]", str(name)):
                fields = _fields(path, name, index, values)
                try:
                    rows.append(_row(name, fields, str(table.get("source", ""))))
                except _CannotRepeat as reason:
                    others.append(
                        NotExpressed(id=fields.row.name, family=name, reason=str(reason))
                    )
    others += broken.among(len(rows) + len(others))
    return Published(path=path, kind=KERNELS, kernels=tuple(rows), not_expressed=tuple(others))


def _fields(path: Path, table: str, index: int, values: Any) -> Fields:
    row = Row(path, (table, "rows", index), f"{table}[{index}]")
    if not isinstance(values, Mapping):
        raise row.fail("", f"must hold keys and values; got {shown(values)}")
    return Fields(row, values)


def _row(table: str, fields: Fields, source: str) -> KernelRow:
    flags = _flags(fields)
    for flag in flags:
        if flag in _INCREDIBLE:
            raise _CannotRepeat(f"flagged {flag}: not a time that a kernel took")
    read = _reader(fields)
    if "gpu" not in fields:
        raise _CannotRepeat("GPU not stated")
    gpu = fields.text("gpu")
    cluster, device = _device(gpu)
    work = read(fields)
    return KernelRow(
        id=fields.row.name,
        family=f"{table} {gpu}",
        group="x".join(str(size) for size in work.dims),
        cluster=cluster,
        device_name=device,
        work=work,
        measured_ns=_time_ns(fields, work),
        flags=flags,
        source=source,
    )


def _flags(fields: Fields) -> tuple[str, ...]:
    single = (fields.text("flag"),) if "flag" in fields else ()
    return single + fields.texts("flags")


def _reader(fields: Fields) -> Callable[[Fields], OpWork]:
    op = fields.text("op", "matmul")
    if op in _ATTENTION_PHASES:
        return _attention
    if all(key in fields for key in ("m", "n", "k")):
        return _grouped if "groups" in fields else _product
    if "mode" in fields or "value_ms" in fields:
        raise _CannotRepeat("the time of whole layers of a model, not of one kernel")
    if "model" in fields:
        raise _CannotRepeat("sizes of the operator are not in the file")
    raise _CannotRepeat(f"no kernel known by the keys {', '.join(sorted(fields.values))}")


def _device(gpu: str) -> tuple[Cluster, str]:
    try:
        hardware = hardware_of(gpu, 1, 1)
    except InputError as error:
        raise _CannotRepeat(str(error)) from None
    return hardware.cluster, hardware.device_name


def _time_ns(fields: Fields, work: OpWork) -> float:
    for key, factor in (("time_ms", NS_PER_MS), ("time_us", NS_PER_US), ("time_s", NS_PER_S)):
        if key in fields:
            return fields.number(key) * factor
    return work.flops / (fields.number("tflops") * 1e12) * NS_PER_S


def _product(fields: Fields) -> OpWork:
    batch, m, n, k = (fields.whole("batch", 1), *(fields.whole(key) for key in "mnk"))
    dtype, written = _dtypes(fields)
    factor = _FACTOR_BYTES.get(dtype, 2.0)
    passes = 2 if fields.truth("accumulate", False) else 1
    moved = batch * (factor * (m * k + k * n) + written * passes * m * n)
    layout = fields.text("layout", "TN")
    return OpWork(
        kind="gemm",
        dims=(batch, m, n, k),
        dtype=dtype,
        flops=2 * batch * m * n * k,
        bytes=round(moved),
        phase="forward" if layout == "TN" else "backward",
        target=fields.text("dtype", ""),
    )


def _dtypes(fields: Fields) -> tuple[str, float]:
    """What the factors are, and bytes of an element of the result.

    'bf16xbf16->f32' is XLA's way to write; its f32 factors are multiplied in TF32.
    """
    text = fields.text("dtype", "bf16").lower()
    factors, _, result = text.partition("->")
    if "f8" in factors or "fp8" in factors:
        dtype = "float8"
    elif "f4" in factors or "fp4" in factors:
        dtype = "float4"
    elif factors == "f32xf32" or "tf32" in factors:
        dtype = "tfloat32"
    elif "fp32" in factors or "f32" in factors or "float32" in factors:
        dtype = "float32"
    else:
        dtype = "float16" if factors in ("fp16", "f16", "f16xf16", "float16") else "bfloat16"
    wide = fields.text("out_dtype", result or "")
    is_wide = "32" in wide or (not wide and dtype in ("float32", "tfloat32"))
    return dtype, 4.0 if is_wide else 2.0


def _grouped(fields: Fields) -> OpWork:
    """Products of as many experts at once; the file's m, n, k are those of the forward pass.

    The weight's gradient is added to one in fp32.
    """
    groups, m, n, k = (fields.whole(key) for key in ("groups", "m", "n", "k"))
    stage = fields.text("stage", "fwd")
    written = 2.0
    if stage == "bwd_grad_act":
        dims = (groups, m, k, n)
    elif stage == "bwd_grad_w":
        dims, written = (groups, n, k, m), 8.0
    else:
        dims = (groups, m, n, k)
    _, rows, columns, depth = dims
    moved = groups * (2.0 * depth * (rows + columns) + written * rows * columns)
    return OpWork(
        kind="gemm",
        dims=dims,
        dtype=_dtypes(fields)[0],
        flops=2 * groups * m * n * k,
        bytes=round(moved),
        phase="forward" if stage == "fwd" else "backward",
        target="grouped_mm",
    )


def _attention(fields: Fields) -> OpWork:
    phase, factor = _ATTENTION_PHASES[fields.text("op")]
    batch, heads, seq = (fields.whole(key) for key in ("batch", "head_num", "seq_len"))
    kv_heads = fields.whole("kv_head_num", heads)
    size = fields.whole("qk_head_dim")
    value_size = fields.whole("v_head_dim", size)
    flops = factor * 2 * batch * heads * seq * seq * (size + value_size)
    elements = batch * seq * (heads + kv_heads) * (size + value_size)
    return OpWork(
        kind="attention",
        dims=(batch, heads, kv_heads, seq, seq, size, int(fields.truth("causal", True))),
        dtype=_dtypes(fields)[0],
        flops=round(flops),
        bytes=round(2 * elements * (2 if phase == "backward" else 1)),
        phase=phase,
    )
