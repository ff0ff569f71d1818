from __future__ import annotations

import pytest

from claw_plan.profiles.device_names import catalogue_name


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("Tesla V100-SXM2-32GB", "v100-sxm-32gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("h100", "h100-sxm-80gb"),
        ("A100-80GB", "a100-sxm-80gb"),
        ("t4", "t4"),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_names(name: str, ours: str | None) -> None:
    assert catalogue_name(name) == ours
