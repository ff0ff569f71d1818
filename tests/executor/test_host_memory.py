from __future__ import annotations

import sys

import pytest
import torch

from claw_plan.executor.host_memory import MemoryMeter
from claw_plan.profiles.units import MIB


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
def test_the_peak_is_what_was_held_since_the_reset() -> None:
    meter = MemoryMeter(torch.device("cpu"))
    large = torch.ones(64 * MIB)  # 256 MiB
    del large
    meter.reset()
    kept = torch.ones(16 * MIB)  # 64 MiB
    peak = meter.peak_bytes()
    assert kept.nbytes * 0.9 < peak < kept.nbytes + 64 * MIB
