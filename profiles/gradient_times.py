"""`GradientTimes`: when the backward of one microbatch completed each parameter's gradient.

Runs record it, a Profile keeps it, planning reads from it where buckets may end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientTimes:
    """Of one run: `ready_ns` by first name of each trained parameter, from any moment on.

    Of several ranks the latest counts.
    """

    device: str
    microbatch_size: int
    ready_ns: Mapping[str, int]

    def __post_init__(self) -> None:
        if not self.ready_ns or min(self.ready_ns.values()) < 0:
            raise ValueError("each trained parameter has a time from 0 on, at least one")
