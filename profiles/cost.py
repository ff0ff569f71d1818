"""How long one piece of work takes: the answers of the cost models, each with its source.

`CostModel` is the one interface between hardware and planner. It is asked with `OpWork` or
`CollectiveWork` and looks first for a measurement of exactly that work, then between measured
ones, then at physics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

from claw_plan.profiles.cluster import Cluster, Node
from claw_plan.profiles.work import CollectiveWork, OpWork

MEASURED, INTERPOLATED, FITTED, ANALYTIC = "measured", "interpolated", "fitted", "analytic"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCost:
    """Time of one kernel on its device, alone, and what the figure rests on.

    `spread` is the relative half-width in which two thirds of measured times lie (0: not known).
    """

    ns: int
    source: str
    spread: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """A collective as the simulator wants it: after `latency_ns` one flow.

    The flow puts `bytes` on each rank's port of the `link` ('intra' or 'inter') and never goes
    faster than `rate_cap_bytes_per_s`, so alone it lasts latency_ns + bytes / rate_cap.
    `algorithm` and `protocol` are those of the library; `spread` is the relative half-width in
    which two thirds of measured times lie (0: not known). `moves` is what it stands for: the
    collective, several when they were merged, none where nobody asks.
    """

    latency_ns: int
    bytes: int
    rate_cap_bytes_per_s: float
    link: str
    source: str
    algorithm: str = ""
    protocol: str = ""
    spread: float = 0.0
    moves: tuple[CollectiveWork, ...] = ()

    @property
    def alone_ns(self) -> int:
        """Duration on idle links, rounded up."""
        if self.bytes == 0:
            return self.latency_ns
        return self.latency_ns + -int(-self.bytes * 1e9 // self.rate_cap_bytes_per_s)


def scaled(cost: CollectiveCost, factor: float) -> CollectiveCost:
    """The collective `factor` times as slow on idle links.

    Below 1 a part of it is not waited for, and does not take its links either: a higher rate
    would meet their capacity.
    """
    if factor == 1.0:
        return cost
    latency_ns = round(cost.latency_ns * factor)
    if factor < 1.0:
        return replace(cost, latency_ns=latency_ns, bytes=round(cost.bytes * factor))
    return replace(
        cost,
        latency_ns=latency_ns,
        rate_cap_bytes_per_s=cost.rate_cap_bytes_per_s / factor,
    )


class CostModel(Protocol):
    """Times on one cluster. `assumptions` are sentences for the report."""

    cluster: Cluster
    assumptions: tuple[str, ...]

    def op(self, work: OpWork) -> OpCost:
        """Time of one kernel on the cluster's device."""

    def collective(self, work: CollectiveWork) -> CollectiveCost:
        """Time of one collective, with all other devices of the nodes doing the same."""

    def among(self, nodes: Sequence[Node]) -> Self:
        """The times on these nodes, of all of the cluster's; the same answer to the same kinds."""

    def quickest(self) -> Self:
        """The times of each piece of work on the kind of node that has it done soonest."""

    def step_overhead_ns(self) -> int:
        """What a step costs beside its kernels and collectives (data, loop, logging)."""
