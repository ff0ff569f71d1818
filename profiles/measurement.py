"""`Measurement`: one piece of work, timed on one kind of device; what a profile is made of.

A failed measurement is a failure and never becomes one of these.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from claw_plan.profiles.work import CollectiveWork, OpWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The times one piece of work took on one kind of device.

    `device` is the name of a `Device`, or for collectives of the device and its link
    ('cpu-core/loopback'). `ranks_per_host` tells how many ranks shared the host meanwhile.
    `provenance` says when, with which versions, and by which command.
    """

    device: str
    work: OpWork | CollectiveWork
    samples_ns: tuple[int, ...]
    ranks_per_host: int = 1
    provenance: Mapping[str, str] = ()  # type: ignore[assignment]  # empty means unknown

    def __post_init__(self) -> None:
        if not self.samples_ns or min(self.samples_ns) < 0:
            raise ValueError(f"a measurement has non-negative samples, but got {self.samples_ns=}")

    @property
    def median_ns(self) -> int:
        """The middle sample."""
        return round(statistics.median(self.samples_ns))

    @property
    def spread_ns(self) -> int:
        """Largest less smallest sample."""
        return max(self.samples_ns) - min(self.samples_ns)
