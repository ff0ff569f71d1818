"""Physics of one kernel: `OpWork` on a `Device` to nanoseconds, without any measurement of it.

Where a profile holds measurements of the kind, `cost_model` corrects these figures by them; what
matters here is how time grows with the shape.

GEMM (m, n, k):      2mnk/R * wave(m, n) * (1 + c/k)
attention:           flops/RA * (1 + a*4096/(s*b*h)), half the flops where causal
memory, optimizer:   bytes/(.85 W)
every kind:          at least its bytes/(.85 W), and the host's time to launch a kernel

R, RA FLOP/s that large kernels sustain; W bytes/s of memory; c depth at which the rate halves, in
proportion to R over the 16-bit one (fitted apart, fp8's is 1.6 times bf16's, its R 1.8); s
query positions, b samples, h heads. Assumes: one kernel per OpWork, operands read once. Not
modelled: caches, fusion, clocks that fall under load (R is what training runs sustain).
Source: forms and constants fitted to 426 published training steps and to the GEMM tables of
XLA's matmul interpolator (github openxla/xla) and SimuMax (github MooreThreads/SimuMax).
"""

from __future__ import annotations

import math

from claw_plan.profiles.cluster import Device
from claw_plan.profiles.work import OpWork

MEMORY_SHARE = 0.85
"""Of the data sheet's bandwidth, reached by streaming kernels (same fit). CPU figures are
measured by copying and taken whole."""

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.82), (64, 64, 0.6))
"""Output tiles a GEMM kernel may use and their efficiency relative to the largest."""

PARTIAL_WAVE = 0.6
"""Share of a last, partly filled wave of tiles that is paid as if it were full."""

_ATTENTION_RAMP = {True: 10.0, False: 3.0}
"""`a` of the formula: on H100 and newer, and on A100 and older. The backward has .3 of it."""

_HOPPER_RAMP = 150


def roofline_ns(device: Device, work: OpWork) -> float:
    """Time of the kernel on the device, alone."""
    compute_s = 0.0
    if work.flops:
        compute_s = _COMPUTE_S.get(work.kind, _plain_s)(device, work)
    share = 1.0 if device.kind == "cpu" else MEMORY_SHARE
    memory_s = work.bytes / (share * device.memory_bytes_per_s)
    return max(max(compute_s, memory_s) * 1e9, float(device.kernel_launch_ns))


def sustained_flops_per_s(device: Device, dtype: str) -> float:
    """The GEMM rate in `dtype`; one the device has no units for runs in the next wider."""
    rates = device.achieved_flops_per_s
    wider = {"float8": ("bfloat16", "float16", "float32")}.get(dtype, ("float32",))
    for name in (dtype, *wider):
        if name in rates:
            return rates[name]
    return min(rate for name, rate in rates.items() if name != "attention")


def gemm_s(device: Device, dtype: str, batch: int, m: int, n: int, k: int) -> float:
    """Seconds of `batch` products (m, k) x (k, n)."""
    flops = 2.0 * batch * m * n * k
    rate = sustained_flops_per_s(device, dtype)
    # What a tile waits before and after its k steps is a time: at a slower rate, fewer steps.
    ramp = 1.0 + device.gemm_ramp * (rate / _half_rate(device, "bfloat16")) / k
    if device.processors:
        flops *= _wave(device.processors, batch, m, n)
    return flops * ramp / rate


def _wave(processors: int, batch: int, m: int, n: int) -> float:
    """How much longer whole tiles in whole waves take than the bare product, at the best tile."""
    best = math.inf
    for rows, columns, efficiency in TILES:
        tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
        full = math.ceil(tiles / processors) * processors
        paid = PARTIAL_WAVE * full + (1 - PARTIAL_WAVE) * max(tiles, processors)
        best = min(best, paid * rows * columns / efficiency)
    return best / (batch * m * n)


def _gemm_work_s(device: Device, work: OpWork) -> float:
    if len(work.dims) != 4 or min(work.dims) < 1:
        return _plain_s(device, work)
    batch, m, n, k = work.dims
    return gemm_s(device, work.dtype, batch, m, n, k)


def _conv_s(device: Device, work: OpWork) -> float:
    """As the implicit GEMM of its shape; `flops` says how much of it (groups, backward)."""
    if len(work.dims) != 5 or min(work.dims) < 1:
        return _plain_s(device, work)
    batch, channels_in, channels_out, positions, kernel = work.dims
    m, n, k = batch * positions, channels_out, channels_in * kernel
    whole_s = gemm_s(device, work.dtype, 1, m, n, k)
    return whole_s * work.flops / (2.0 * m * n * k)


def _attention_s(device: Device, work: OpWork) -> float:
    """`flops` count the full matrix; flash kernels skip the half that a causal mask hides."""
    half = "float32" if device.kind == "cpu" else "bfloat16"
    rate = device.achieved_flops_per_s.get("attention", 0.0) * (
        sustained_flops_per_s(device, work.dtype) / _half_rate(device, half)
    )
    if rate <= 0:
        return _plain_s(device, work)
    flops = float(work.flops)
    if len(work.dims) == 7:
        batch, heads, _, queries, _, _, causal = work.dims
        flops *= 0.5 if causal else 1.0
        if device.processors:
            ramp = _ATTENTION_RAMP[device.gemm_ramp >= _HOPPER_RAMP]
            ramp *= 0.3 if work.phase == "backward" else 1.0
            flops *= 1.0 + ramp * 4096 / max(1, queries * batch * heads)
    return flops / rate


def _half_rate(device: Device, dtype: str) -> float:
    rates = device.achieved_flops_per_s
    return rates.get(dtype, rates.get("float16", sustained_flops_per_s(device, "float32")))


def _plain_s(device: Device, work: OpWork) -> float:
    return work.flops / sustained_flops_per_s(device, work.dtype)


def _bytes_only_s(device: Device, work: OpWork) -> float:
    """Element-wise flops hide behind the bytes."""
    return 0.0


_COMPUTE_S = {
    "gemm": _gemm_work_s,
    "conv": _conv_s,
    "attention": _attention_s,
    "memory": _bytes_only_s,
    "optimizer": _bytes_only_s,
}
