"""Which implementation serves which device."""

from __future__ import annotations

import torch

from claw_plan.kernels import compiled, reference
from claw_plan.kernels.backend import backend_of


def test_the_cpu_is_served_by_compiled_loops() -> None:
    assert backend_of(torch.empty(1)) is compiled


def test_a_device_without_kernels_of_its_own_is_served_by_torch() -> None:
    assert backend_of(torch.empty(1, device="meta")) is reference
