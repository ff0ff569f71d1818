"""Physics of one kernel: `OpWork` on a `Device` to nanoseconds, without any measurement on it.

Where a profile holds measurements of the kind, `cost_model` corrects these figures by them; what
matters here is how time grows with the shape, and what the figure rests on.

product (GEMM)       a table's measured or fitted shape (`gemm_cost`), at the device's rate
flash attention      `attention_cost`, at the device's rate
memory, optimizer    bytes/(.85 W)
every kind           at least its bytes/(.85 W), plus what a kernel takes to start and end

W are bytes/s of memory. Tables give the shape of efficiency, the catalogue its level, because
tables are short runs at clocks that training does not sustain. CPUs have no table: their
products take flops over rate. Assumes: one kernel per OpWork, operands read once. Not modelled:
caches, fusion.
"""

from __future__ import annotations

from dataclasses import dataclass

from claw_plan.profiles import kernel_tables
from claw_plan.profiles.cluster import Device
from claw_plan.profiles.cost import ANALYTIC, FITTED, INTERPOLATED
from claw_plan.profiles.gemm_cost import BLEND, factor_bytes, operand_bytes
from claw_plan.profiles.rates import (
    ATTENTION,
    half_rate,
    level_of_dtype,
    sustained_flops_per_s,
)
from claw_plan.profiles.work import OpWork

MEMORY_SHARE = 0.85
"""Of the data sheet's bandwidth, reached by streaming kernels: fitted to 426 published training
steps. CPU figures are measured by copying and taken whole."""

SETUP_S = 2e-6
"""What a kernel takes beside its work when kernels follow each other: SimuMax's loops of products
leave 2.5 us on A100 and .9 us on B200. Single timed calls show 5 us and more, their events'."""

GROUPED_BLEND = 1.0
"""Each group's weights are read anew, with little to compute meanwhile: bytes add to compute. So
SimuMax's grouped products on B200 (20 to 256 groups, 128 to 9832 rows each, three phases) are met
with a mean error of 12 %; with the blend of single products 31 %."""

MEMORY_SPREAD = 0.1
"""As `GemmShape.spread`, of element-wise kernels: a guess from .75 to .95 of the data sheet's
bandwidth, between which streaming kernels lie."""

BORROWED_SPREAD = {
    kernel_tables.OWN: 0.0,
    kernel_tables.GENERATION: 0.02,
    kernel_tables.OTHER: 0.03,
}
"""What borrowing a shape adds to its spread: with its level fitted, each part's 16-bit table is
predicted by the other parts' constants with a median error of 1.4 to 3 %, by its own of 1 to
1.5 %; nine in ten errors stay below 7 to 10 %, and 4 to 6 %."""

MISALIGNED = 6.0
"""Slower are batched 16-bit products whose head size is no multiple of 8, and 1.15 times those
where it is none of 64: taken from BigScience's runs with head sizes 108, 144, 216 and 80."""

UNEVEN = 1.15

_LARGEST_HEAD = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """Nanoseconds of one kernel, alone on the device.

    `level` names the rate of the device that it hangs on, None where that is memory, and
    `level_share` says how much: d ln(ns) / d ln(rate) is its negative. `spread` is the relative
    half-width in which two thirds of the times lie, as far as the shape is concerned.
    """

    ns: float
    source: str
    spread: float = 0.0
    level: str | None = None
    level_share: float = 0.0


def kernel_time(device: Device, work: OpWork) -> KernelTime:
    """Time of the kernel on the device, and what it rests on."""
    share = 1.0 if device.kind == "cpu" else MEMORY_SHARE
    memory_s = work.bytes / (share * device.memory_bytes_per_s)
    setup_s = SETUP_S if device.processors else 0.0
    compute = _compute(device, work) if work.flops else None
    if compute is None or compute.ns <= memory_s * 1e9:
        spread = MEMORY_SPREAD if device.processors else 0.0
        return KernelTime(ns=(memory_s + setup_s) * 1e9, source=ANALYTIC, spread=spread)
    ns = compute.ns + setup_s * 1e9
    return KernelTime(
        ns=ns,
        source=compute.source,
        spread=compute.spread,
        level=compute.level,
        level_share=compute.level_share * compute.ns / ns,
    )


def roofline_ns(device: Device, work: OpWork) -> float:
    """Time of the kernel on the device, alone; none is faster than the host's launching it."""
    return max(kernel_time(device, work).ns, float(device.kernel_launch_ns))


def level_of(device: Device, work: OpWork) -> str | None:
    """The rate whose change scales the kernel's time inversely; None where bytes bound it."""
    time = kernel_time(device, work)
    return time.level if time.level_share > 0.5 else None


def gemm_s(device: Device, dtype: str, batch: int, m: int, n: int, k: int) -> float:
    """Seconds of `batch` products (m, k) x (k, n) inside other work."""
    return _product(device, dtype, (batch, m, n, k)).ns * 1e-9


def shape_efficiency(device: Device, dtype: str, batch: int, m: int, n: int, k: int) -> float:
    """The share of the level that the product reaches, by its shape."""
    rate = sustained_flops_per_s(device, dtype)
    return 2.0 * batch * m * n * k / rate / gemm_s(device, dtype, batch, m, n, k)


def _compute(device: Device, work: OpWork) -> KernelTime | None:
    """What the kernel takes for its flops; None where they hide behind the bytes."""
    kind = work.kind
    if kind == "gemm" and len(work.dims) == 4 and min(work.dims) >= 1:
        return _product(
            device, work.dtype, work.dims, work.bytes, is_grouped="grouped" in work.target
        )
    if kind == "attention":
        return _attention(device, work)
    if kind == "conv" and len(work.dims) == 5 and min(work.dims) >= 1:
        return _convolution(device, work)
    return None if kind in ("memory", "optimizer") else _plain(device, work)


def _plain(device: Device, work: OpWork) -> KernelTime:
    level = level_of_dtype(device, work.dtype)
    seconds = work.flops / device.achieved_flops_per_s[level]
    return KernelTime(ns=seconds * 1e9, source=ANALYTIC, level=level, level_share=1.0)


def _product(
    device: Device,
    dtype: str,
    dims: tuple[int, ...],
    size_bytes: int = 0,
    *,
    is_grouped: bool = False,
) -> KernelTime:
    """One product, or equal ones.

    Bytes beyond factors and result in 16 bit (fp32 accumulation, weights of further groups) are
    moved besides.
    """
    level = level_of_dtype(device, dtype)
    rate = device.achieved_flops_per_s[level]
    batch, m, n, k = dims
    if not device.processors:
        ramp = 1.0 + device.gemm_ramp * (rate / half_rate(device)) / k
        seconds = 2.0 * batch * m * n * k * ramp / rate
        return KernelTime(ns=seconds * 1e9, source=ANALYTIC, level=level, level_share=1.0)
    chosen = kernel_tables.gemm_shape_of(device.name, level)
    shape, element = chosen.shape, factor_bytes(dtype)
    operands = operand_bytes(element, batch, m, n, k)
    extra = max(0.0, size_bytes - operand_bytes(max(2.0, element), batch, m, n, k))
    if is_grouped:
        operands, extra = max(operands, float(size_bytes)), 0.0
    is_its_table = chosen.dtype == ("bfloat16" if level == "float16" else level)
    measured = None
    if is_its_table:
        measured = kernel_tables.measured_ratio(shape, (batch, m, n, k), extra)
    ramp_scale = _ramp_scale(device, chosen, rate)
    time = shape.time(
        device.processors,
        (batch, m, n, k),
        memory_bytes_per_s=device.memory_bytes_per_s,
        operand_bytes=operands,
        extra_bytes=extra,
        flops_per_s=rate,
        ramp_scale=ramp_scale,
        factor=_alignment(dtype, batch, n, k) * (measured or 1.0),
        blend=GROUPED_BLEND if is_grouped else BLEND,
    )
    is_known = chosen.origin != kernel_tables.OTHER and time.beyond == 0
    spread = shape.spread + time.beyond * shape.spread_per_octave + BORROWED_SPREAD[chosen.origin]
    return KernelTime(
        ns=time.seconds * 1e9,
        source=INTERPOLATED if is_known and is_its_table else FITTED,
        spread=BORROWED_SPREAD[chosen.origin] if measured else spread,
        level=level,
        # A ramp that follows the rate lasts as long at any.
        level_share=time.compute_share
        * (1.0 if is_its_table else k / (k + shape.ramp * ramp_scale)),
    )


def _ramp_scale(device: Device, chosen: kernel_tables.ChosenShape, rate: float) -> float:
    """What a tile waits before and after its steps is a time: at a higher rate, more steps."""
    base = half_rate(device, chosen.dtype)
    if chosen.origin == kernel_tables.OTHER and device.gemm_ramp:
        return device.gemm_ramp / chosen.shape.ramp * rate / half_rate(device)
    return rate / base


def _alignment(dtype: str, batch: int, n: int, k: int) -> float:
    """Unfused attention's products: head sizes that tensor cores cannot load whole."""
    head = min(n, k)
    if batch == 1 or head > _LARGEST_HEAD or dtype not in ("float16", "bfloat16"):
        return 1.0
    return MISALIGNED if head % 8 else UNEVEN if head % 64 else 1.0


def _convolution(device: Device, work: OpWork) -> KernelTime:
    """As the implicit GEMM of its shape; `flops` says how much of it (groups, backward)."""
    batch, channels_in, channels_out, positions, kernel = work.dims
    m, n, k = batch * positions, channels_out, channels_in * kernel
    whole = _product(device, work.dtype, (1, m, n, k))
    return KernelTime(
        ns=whole.ns * work.flops / (2.0 * m * n * k),
        source=FITTED if device.processors else ANALYTIC,
        spread=whole.spread + BORROWED_SPREAD[kernel_tables.OTHER],
        level=whole.level,
        level_share=whole.level_share,
    )


def _attention(device: Device, work: OpWork) -> KernelTime:
    """`flops` count the full matrix; flash kernels skip the half that a causal mask hides."""
    dtype = "float32" if device.kind == "cpu" else "bfloat16"
    rate = device.achieved_flops_per_s.get(ATTENTION, 0.0) * (
        sustained_flops_per_s(device, work.dtype) / half_rate(device, dtype)
    )
    if rate <= 0:
        return _plain(device, work)
    if not device.processors or len(work.dims) != 7 or min(work.dims[:6]) < 1:
        causal = len(work.dims) == 7 and work.dims[6]
        seconds = work.flops * (0.5 if causal else 1.0) / rate
        return KernelTime(ns=seconds * 1e9, source=ANALYTIC, level=ATTENTION, level_share=1.0)
    shape, origin = kernel_tables.attention_shape_of(device.name)
    seconds = shape.seconds(
        device.processors, work.dims, phase=work.phase, flops_per_s=rate, flops=work.flops
    )
    return KernelTime(
        ns=seconds * 1e9,
        source=FITTED,
        spread=shape.spread + BORROWED_SPREAD[origin],
        level=ATTENTION,
        level_share=1.0,
    )
