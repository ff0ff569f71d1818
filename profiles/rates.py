"""The rates a device sustains: which of them bounds a kernel in a dtype, and how much it is."""

from __future__ import annotations

from claw_plan.profiles.cluster import Device

ATTENTION = "attention"

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
