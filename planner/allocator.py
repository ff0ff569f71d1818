"""From the bytes of tensors to what a device shows of them, and how far that was off.

Figures of memory differ in kind. 'allocated' is torch's maximum of live tensors. 'reserved' is
what its caching allocator has taken from the device: blocks it cannot fill, and those it keeps.
'nvidia-smi' has beside it what no allocator sees: the context, kernels, buffers of communication
libraries and of the trainer. 'activations' and 'states' are parts, as papers print them.

Three constants, fitted by `bench/memory.py --fit` to 59 published readings with whole groups of
runs left out. The loss weighs what is too low more than twice as much as what is too high: a run
that does not fit is worse than a device not filled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

RESERVED_RATIO = 1.22
"""Reserved bytes for each allocated one. From 13 readings of torchtitan (reserved) and 49 of
BigScience (nvidia-smi), by `bench/memory.py --fit`."""

OUTSIDE_BYTES = 3_250_000_000
"""What nvidia-smi shows beyond reserved bytes; same fit, drawn to 3 GB (a context of about 1 GB,
as BigScience says, and buffers of NCCL and of ZeRO)."""

SPREADS = {"allocated": 0.02, "reserved": 0.06, "nvidia-smi": 0.09}
"""Standard deviation of the log error of each kind with groups left out (`bench/memory.py --fit`);
'activations' and 'states' are exact by their papers' formulas."""

HOST_RATIO, HOST_SPREAD = 1.57, 0.29
"""Of a CPU's process: the pages it held for each byte of tensors, and the standard deviation of
the log error. Geometric mean of the 15 runs in docs/predicted.md, of 60 to 310 MiB."""

NEEDED_RATIO = 1.10
"""Bytes a run cannot do without for each allocated one; the rest of what is reserved the allocator
gives back before it fails. Between 1.084 and 1.125 every one of the published verdicts that can be
told by it is right: 6 BigScience and 2 Megatron runs out of memory, 126 that ran."""

WITHIN_80_PERCENT = 1.2816
"""Standard deviations either side of a normal distribution's middle 80 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a device is expected to show; `spread` is the standard deviation of its log error."""

    expected_bytes: int
    spread: float

    @property
    def interval_bytes(self) -> tuple[int, int]:
        """Bounds of the middle 80 % of what such predictions turned out to be."""
        factor = math.exp(WITHIN_80_PERCENT * self.spread)
        return round(self.expected_bytes / factor), round(self.expected_bytes * factor)

    def probability_above(self, limit_bytes: int) -> float:
        """The probability that it is more than a limit."""
        if limit_bytes <= 0 or self.expected_bytes <= 0:
            return float(self.expected_bytes > limit_bytes)
        distance = math.log(self.expected_bytes / limit_bytes)
        return 0.5 * math.erfc(-distance / (self.spread * math.sqrt(2.0)))


def shown(allocated_bytes: int, kind: str = "nvidia-smi") -> Shown:
    """What a reading of that kind shows of so many bytes of tensors."""
    expected = float(allocated_bytes)
    if kind in ("reserved", "nvidia-smi"):
        expected *= RESERVED_RATIO
    if kind == "nvidia-smi":
        expected += OUTSIDE_BYTES
    return Shown(expected_bytes=round(expected), spread=SPREADS.get(kind, SPREADS["allocated"]))


def needed(allocated_bytes: int) -> Shown:
    """What a device must have for so many bytes of tensors."""
    expected = round(allocated_bytes * NEEDED_RATIO) + OUTSIDE_BYTES
    return Shown(expected_bytes=expected, spread=SPREADS["nvidia-smi"])


def shown_by_host(allocated_bytes: int) -> Shown:
    """What a CPU's process holds of so many bytes of tensors."""
    return Shown(expected_bytes=round(allocated_bytes * HOST_RATIO), spread=HOST_SPREAD)
