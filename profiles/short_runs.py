"""Published kernels as the tables' shapes predict them: under their tables' own conditions.

A table times one kernel over and over for some milliseconds, at clocks that training does not
sustain, and counts what a call costs beside the kernel. So the level is the table's and its
overhead is added; measured times of the shape are not looked up, that the error may tell of the
shapes in between. A table nobody fitted takes XLA's 16-bit one where the part has it, else the
shape and level that planning would.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

from claw_plan.profiles import kernel_tables
from claw_plan.profiles.attention_cost import AttentionShape
from claw_plan.profiles.cluster import Device
from claw_plan.profiles.gemm_cost import BLEND, GemmShape, factor_bytes, operand_bytes
from claw_plan.profiles.op_cost import GROUPED_BLEND, kernel_time
from claw_plan.profiles.published_rows import KernelRow
from claw_plan.profiles.rates import level_of_dtype, sustained_flops_per_s
from claw_plan.profiles.work import OpWork

SOURCES = {
    "xla_matmul_table": "xla",
    "simumax_efficiency": "simumax",
    "neusight_linear_fp32": "neusight",
}
"""The source, by the name of the table in the data file."""

_FLOOR_BLEND = 4
"""As `fit.attention` fits the floor of its rows."""


def short_run_times_ns(rows: Sequence[KernelRow]) -> dict[str, int]:
    """The time of each kernel, by row id.

    The second row of one shape in a table belongs to a second run (see `fit.kernel_rows`).
    """
    seen: dict[Hashable, int] = defaultdict(int)
    times = {}
    for row in rows:
        work = row.work
        key = (row.family, work.kind, work.dims, work.target, work.bytes)
        seen[key] += 1
        source = SOURCES.get(row.family.partition(" ")[0], "")
        if source == "xla" and seen[key] > 1:
            source = "xla-2"
        device = row.cluster.nodes[0].device
        times[row.id] = max(1, round(short_run_s(device, work, source) * 1e9))
    return times


def short_run_s(device: Device, work: OpWork, source: str = "") -> float:
    """Seconds of one kernel in a table of that source; '' is a table that was not fitted."""
    if device.processors and work.kind == "attention" and len(work.dims) == 7:
        return _attention_s(device, work)
    if device.processors and work.kind == "gemm" and len(work.dims) == 4:
        return _product_s(device, work, source)
    return kernel_time(device, work).ns * 1e-9


def _product_s(device: Device, work: OpWork, source: str) -> float:
    batch, m, n, k = work.dims
    element = factor_bytes(work.dtype)
    operands = operand_bytes(element, batch, m, n, k)
    extra = max(0.0, work.bytes - operands)
    is_grouped = "grouped" in work.target
    shape, rate = _shape_and_rate(device, work, source, extra / (batch * m * n))
    time = shape.time(
        device.processors,
        (batch, m, n, k),
        memory_bytes_per_s=device.memory_bytes_per_s,
        operand_bytes=operands + extra if is_grouped else operands,
        extra_bytes=0.0 if is_grouped else extra,
        flops_per_s=rate,
        blend=GROUPED_BLEND if is_grouped else BLEND,
    )
    return shape.overhead_s + time.seconds


def _shape_and_rate(
    device: Device, work: OpWork, source: str, extra_per_output: float
) -> tuple[GemmShape, float]:
    """The table's shape, or the nearest with the rate of the table, of its part, of training."""
    tables = kernel_tables.gemm_shapes()
    dtype = "bfloat16" if work.dtype == "float16" else work.dtype
    own = None
    for name in _names(device.name, dtype, source, extra_per_output):
        own = own or tables.get(name)
    if own is not None and "grouped" not in work.target:
        return own, own.flops_per_s
    chosen = kernel_tables.gemm_shape_of(device.name, level_of_dtype(device, work.dtype))
    sustained = sustained_flops_per_s(device, work.dtype)
    if own is not None:
        return chosen.shape, own.flops_per_s
    if chosen.origin == kernel_tables.OTHER or chosen.dtype != dtype:
        return chosen.shape, sustained
    return chosen.shape, max(chosen.shape.flops_per_s, sustained)


def _names(part: str, dtype: str, source: str, extra_per_output: float) -> list[str]:
    """Tables that the row may stand in, the likeliest first; XLA's runs are the shortest."""
    if not source and dtype == "bfloat16":
        return [f"{kernel_tables.part_of(part)[0]}/{dtype}/xla"]
    wide = f"{part}/{dtype}-float32/{source}"
    plain = [f"{part}/{dtype}/{source}", f"{part}/{dtype}/{source.partition('-')[0]}"]
    return [wide, *plain] if extra_per_output == 2 and source == "xla" else plain


def _attention_s(device: Device, work: OpWork) -> float:
    shape, origin = kernel_tables.attention_shape_of(device.name)
    rate = shape.flops_per_s
    if origin == kernel_tables.OTHER or shape.table == "h100":
        rate = device.achieved_flops_per_s.get("attention", rate)
    seconds = shape.seconds(
        device.processors, work.dims, phase=work.phase, flops_per_s=rate, flops=work.flops
    )
    floor = _floor_s(shape, work.phase)
    return float((seconds**_FLOOR_BLEND + floor**_FLOOR_BLEND) ** (1 / _FLOOR_BLEND))


def _floor_s(shape: AttentionShape, phase: str) -> float:
    return shape.backward_floor_s if phase == "backward" else shape.forward_floor_s
