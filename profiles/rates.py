"""The rates a device sustains: which of them bounds a kernel in a dtype, and how much it is."""

from __future__ import annotations

from collections.abc import Mapping

from claw_plan.profiles.cluster import Device

ATTENTION = "attention"

RATES: Mapping[str, tuple[str, ...]] = {
    "half": ("bfloat16", "float16"),
    "float32": ("float32",),
    "float8": ("float8",),
    "float4": ("float4",),
    ATTENTION: (ATTENTION,),
}
"""Rates that are known apart, and the dtypes (and attention) each is for."""

PEAK_SHARE = 0.78
"""Of the 16-bit peak, sustained by products in training where power does not limit them (A100)."""

FLOPS_PER_S_PER_W = 1.0e12
"""16-bit operations a second for each watt of board power, where that is less: on Hopper and later
the rates fitted to training runs are .98 to 1.08 TFLOP/s a watt (H100 of 700 and of 500 W, B200,
GB200), while their peaks are 1.4 to 2.3."""

OTHER_SHARES = {"float8": 0.95, "float4": 0.85, ATTENTION: 0.75, "float32": 0.9}
"""The rates of fp8 and fp4 beside the 16-bit one, each as a share of its peak beside that one's;
flash attention's beside it; float32's of its own peak (fitted rates of A100 to GB300)."""


def usual_rates(peak: Mapping[str, float], power_w: int | None) -> dict[str, float]:
    """What a part of these peaks and this power sustains, where nobody has measured it.

    By dtype, and 'attention' (counting the half that a causal mask leaves).
    """
    top = peak.get("bfloat16", peak.get("float16", 0.0))
    half = PEAK_SHARE * top
    if power_w:
        half = min(half, FLOPS_PER_S_PER_W * power_w)
    rates = {dtype: OTHER_SHARES["float32"] * rate for dtype, rate in peak.items()}
    rates |= {dtype: half for dtype in RATES["half"] if dtype in peak}
    for name in ("float8", "float4"):
        if name in peak and top:
            rates[name] = OTHER_SHARES[name] * peak[name] / top * half
    rates[ATTENTION] = OTHER_SHARES[ATTENTION] * (half or rates.get("float32", 0.0))
    return rates


_WIDER = {
    "float4": ("float8", "bfloat16", "float16", "float32"),
    "float8": ("bfloat16", "float16", "float32"),
}


def level_of_dtype(device: Device, dtype: str) -> str:
    """The name of the GEMM rate in `dtype`: one without units for it runs in the next wider."""
    rates = device.achieved_flops_per_s
    for name in (dtype, *_WIDER.get(dtype, ("float32",))):
        if name in rates:
            return name
    return min((name for name in rates if name != ATTENTION), key=lambda name: rates[name])


def sustained_flops_per_s(device: Device, dtype: str) -> float:
    """The GEMM rate in `dtype`."""
    return device.achieved_flops_per_s[level_of_dtype(device, dtype)]


def half_rate(device: Device, dtype: str = "bfloat16") -> float:
    """The rate in `dtype`, else in float16, else in float32."""
    rates = device.achieved_flops_per_s
    return rates.get(dtype, rates.get("float16", sustained_flops_per_s(device, "float32")))
