from __future__ import annotations

import pytest

from claw_plan.profiles import catalogue
from claw_plan.profiles.rates import half_rate, level_of_dtype, sustained_flops_per_s, usual_rates

A100 = catalogue.device("a100-sxm-80gb", with_fitted=False)
V100 = catalogue.device("v100-sxm-16gb", with_fitted=False)


def test_dtypes_without_units_run_in_the_next_wider() -> None:
    assert sustained_flops_per_s(V100, "float16") == pytest.approx(0.78 * 125e12)
    assert sustained_flops_per_s(V100, "bfloat16") == 13e12
    assert sustained_flops_per_s(A100, "float8") == pytest.approx(0.78 * 312e12)
    assert sustained_flops_per_s(A100, "complex64") == 18e12


def test_the_level_is_named() -> None:
    assert level_of_dtype(A100, "bfloat16") == "bfloat16"
    assert level_of_dtype(A100, "float4") == "bfloat16"
    assert level_of_dtype(V100, "float8") == "float16"
    assert level_of_dtype(V100, "bfloat16") == "float32"


def test_half_precision_is_what_the_device_has() -> None:
    assert half_rate(A100) == pytest.approx(0.78 * 312e12)
    assert half_rate(V100) == pytest.approx(0.78 * 125e12)


def test_power_limits_what_the_peak_would_allow() -> None:
    peak = {"bfloat16": 2250e12, "float8": 4500e12, "float4": 9000e12, "float32": 75e12}
    rates = usual_rates(peak, 1000)
    assert rates["bfloat16"] == 1000e12
    assert rates["float8"] == pytest.approx(0.95 * 2 * 1000e12)
    assert rates["float4"] == pytest.approx(0.85 * 4 * 1000e12)
    assert rates["float32"] == pytest.approx(0.9 * 75e12)
    assert usual_rates(peak, None)["bfloat16"] == pytest.approx(0.78 * 2250e12)
