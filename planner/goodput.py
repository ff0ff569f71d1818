"""What failures cost a long training: checkpoints, lost work and restarts, per useful second.

The system fails every M = node MTBF / nodes on average, exponentially. A checkpoint of C is
written after every tau of work; a failure loses the work since the last, and R until training
goes on.

    expected time / useful time = M e^(R/M) (e^((tau + C)/M) - 1) / tau

Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
FGCS 22 (2006), equation 20 (the whole) and 37 (the interval); J. W. Young, "A first order
approximation to the optimum checkpoint interval", CACM 17 (1974). Assumes: failures come
independently, also while checkpoints are written and restarts are made. Not modelled: checkpoints
written beside the training, spare nodes. `simulator.failures` plays the same and must agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from claw_plan.profiles.units import NS_PER_S, format_ns

WRITE_BYTES_PER_S = 1e9
"""A node's share of a file system's writes: 2 TB/s sustained for 16,384 GPUs on 2,048 nodes
(Llama 3, arXiv 2407.21783, section 3.3.1)."""

RESTART_NS = 300 * NS_PER_S
"""From a failure to the next step: assumed, five minutes to find it, start again and load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """How often nodes fail and what a checkpoint and a restart take."""

    node_mtbf_ns: int
    state_bytes: int
    write_bytes_per_s: float = WRITE_BYTES_PER_S
    restart_ns: int = RESTART_NS

    def mtbf_ns(self, nodes: int) -> float:
        """Mean time between failures of any of the nodes."""
        return self.node_mtbf_ns / nodes

    def checkpoint_ns(self, nodes: int) -> float:
        """Time to write the states, shared by the nodes."""
        return max(1.0, self.state_bytes / (self.write_bytes_per_s * nodes) * NS_PER_S)

    def interval_ns(self, nodes: int) -> float:
        """Work between checkpoints after Daly."""
        return daly_ns(self.checkpoint_ns(nodes), self.mtbf_ns(nodes))

    def sentence(self, nodes: int) -> str:
        """For the report."""
        lasting = 1 / slowdown(self, nodes)
        return (
            f"{lasting:.1%} of the time is useful on {nodes} nodes that fail every "
            f"{_long(self.mtbf_ns(nodes))} together, with a checkpoint of "
            f"{format_ns(self.checkpoint_ns(nodes))} after every {_long(self.interval_ns(nodes))} "
            f"of work (Daly) and restarts of {format_ns(self.restart_ns)} (assumed)"
        )


def _long(time_ns: float) -> str:
    hours = time_ns / (3600 * NS_PER_S)
    return f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.0f} min"


def young_ns(checkpoint_ns: float, mtbf_ns: float) -> float:
    """The first-order interval: sqrt(2 C M)."""
    return math.sqrt(2 * checkpoint_ns * mtbf_ns)


def daly_ns(checkpoint_ns: float, mtbf_ns: float) -> float:
    """The higher-order interval; the MTBF where a checkpoint takes over twice as long as that."""
    if checkpoint_ns >= 2 * mtbf_ns:
        return mtbf_ns
    ratio = checkpoint_ns / (2 * mtbf_ns)
    return (
        young_ns(checkpoint_ns, mtbf_ns) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_ns
    )


def expected_ratio(
    interval_ns: float, checkpoint_ns: float, restart_ns: float, mtbf_ns: float
) -> float:
    """Expected time over useful time; infinite where no interval is ever finished."""
    exponent = (interval_ns + checkpoint_ns) / mtbf_ns
    if exponent > 700 or restart_ns / mtbf_ns > 700:  # e^709 is the largest float
        return math.inf
    return mtbf_ns * math.exp(restart_ns / mtbf_ns) * math.expm1(exponent) / interval_ns


def slowdown(failures: Failures, nodes: int) -> float:
    """By what a step's time is stretched on so many nodes at the best interval.

    At most 10^6: with more, nothing is ever trained.
    """
    ratio = expected_ratio(
        failures.interval_ns(nodes),
        failures.checkpoint_ns(nodes),
        failures.restart_ns,
        failures.mtbf_ns(nodes),
    )
    return min(ratio, 1e6)
