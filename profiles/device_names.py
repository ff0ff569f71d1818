"""What drivers, Slurm and people call a device, to the name the catalogue has it under."""

from __future__ import annotations

import re

from claw_plan.profiles.catalogue import ALIASES, catalogue

_NAMES = (
    (r"V100-SXM\S*-16GB", "v100-sxm-16gb"),
    (r"V100-SXM\S*-32GB", "v100-sxm-32gb"),
    (r"A100-SXM\S*-40GB", "a100-sxm-40gb"),
    (r"A100-SXM\S*-80GB", "a100-sxm-80gb"),
    (r"A100-PCIE-40GB", "a100-pcie-40gb"),
    (r"A100 80GB PCIe", "a100-pcie-80gb"),
    (r"H100 PCIe", "h100-pcie-80gb"),
    (r"H100 80GB HBM3", "h100-sxm-80gb"),
    (r"H200( SXM)?\Z", "h200-sxm-141gb"),
    (r"GB200", "gb200-186gb"),
    (r"B200", "b200-sxm-180gb"),
    (r"L4\Z", "l4"),
    (r"A10G", "a10g"),
    (r"T4\Z", "t4"),
    (r"RTX 4090\Z", "rtx-4090"),
    (r"MI300X", "mi300x"),
)
"""What drivers call a device (a pattern) and what the catalogue does."""


def catalogue_name(name: str) -> str | None:
    """'NVIDIA A100-SXM4-80GB', 'h100' or 'a100-80gb' in the catalogue; None if not there."""
    known = ALIASES.get(name.lower(), name.lower())
    if known in catalogue().devices:
        return known
    return next((ours for theirs, ours in _NAMES if re.search(theirs, name)), None)
