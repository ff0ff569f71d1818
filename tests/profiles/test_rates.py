from __future__ import annotations

from claw_plan.profiles import catalogue
from claw_plan.profiles.rates import half_rate, level_of_dtype, sustained_flops_per_s

A100 = catalogue.device("a100-sxm-80gb")
V100 = catalogue.device("v100-sxm-16gb")


def test_dtypes_without_units_run_in_the_next_wider() -> None:
    assert sustained_flops_per_s(V100, "float16") == 84e12
    assert sustained_flops_per_s(V100, "bfloat16") == 13e12
    assert sustained_flops_per_s(A100, "float8") == 243e12
    assert sustained_flops_per_s(A100, "complex64") == 18e12


def test_the_level_is_named() -> None:
    assert level_of_dtype(A100, "bfloat16") == "bfloat16"
    assert level_of_dtype(A100, "float4") == "bfloat16"
    assert level_of_dtype(V100, "float8") == "float16"
    assert level_of_dtype(V100, "bfloat16") == "float32"


def test_half_precision_is_what_the_device_has() -> None:
    assert half_rate(A100) == 243e12
    assert half_rate(V100) == 84e12
