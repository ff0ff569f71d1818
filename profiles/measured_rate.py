"""When a measured bandwidth overrides a nominal one, and what is said about it.

Read by `cluster_file` for figures in a cluster file, and by `topology.measured` for logs.
"""

from __future__ import annotations

TOLERANCE = 0.25
"""A measured bandwidth that differs more from the nominal one is told."""


def differs(measured_bytes_per_s: float, nominal_bytes_per_s: float) -> bool:
    """Whether a measured rate is further from the nominal one than TOLERANCE."""
    return abs(measured_bytes_per_s / nominal_bytes_per_s - 1) > TOLERANCE


def difference(
    what: str, measured_bytes_per_s: float, nominal_bytes_per_s: float, where: str
) -> str:
    """The sentence about a measured rate that overrides a nominal one."""
    share = measured_bytes_per_s / nominal_bytes_per_s - 1
    return (
        f"{what}: measured {measured_bytes_per_s / 1e9:.4g} GB/s ({where}) overrides the nominal "
        f"{nominal_bytes_per_s / 1e9:.4g} GB/s, from which it differs by {share:+.0%}"
    )
