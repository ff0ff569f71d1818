"""The network between the hosts, measured before step 1 and held against the plan's figures.

One rank of each host sends to that of the next host, both ways, one way at a time: what a network
carries may differ by direction, and the slower one binds. Pairs that share no host measure at
once, so that it takes no longer on many hosts than on three.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from claw_plan.executor.benchmark_rates import gigabytes_per_s
from claw_plan.profiles.cluster import Cluster
from claw_plan.profiles.units import MIB

SLOW = 0.5
"""A link is named that carries less than this part of what the plan counts on: half is beyond
what protocols and a busy switch take away, and a wrong card is ten times slower."""

REPEATS = 3
SECONDS = 0.05
"""A message takes about so long at the expected rate: long against the start of a transfer."""

LEAST_BYTES, MOST_BYTES = MIB, 256 * MIB


@dataclass(frozen=True, kw_only=True)
class LinkRate:
    """What went from one host to another in the best of a few messages."""

    source: str
    target: str
    bytes_per_s: float
    expected_bytes_per_s: float

    @property
    def is_slow(self) -> bool:
        """Whether the plan counts on much more."""
        return self.bytes_per_s < SLOW * self.expected_bytes_per_s

    def __str__(self) -> str:
        return (
            f"from {self.source} to {self.target} {gigabytes_per_s(self.bytes_per_s)} were "
            f"measured, the plan counts on {gigabytes_per_s(self.expected_bytes_per_s)}"
        )


def expected_rate(cluster: Cluster, node: int) -> float:
    """Bytes per second that one rank's messages leave the node with, by the plan's cluster."""
    nodes = cluster.nodes
    return nodes[min(node, len(nodes) - 1)].nic.rate("send") / cluster.network.oversubscription


def measure_links(
    leaders: Sequence[int],
    names: Sequence[str],
    cluster: Cluster,
    nodes: Sequence[int],
    device: torch.device,
) -> list[LinkRate]:
    """Rates between neighbouring hosts, on all ranks. All ranks of the default group call it.

    `leaders` are one rank of each host, `names` and `nodes` the hosts' names and their nodes in
    the cluster.
    """
    expected = min(expected_rate(cluster, node) for node in nodes)
    size = int(min(max(expected * SECONDS, LEAST_BYTES), MOST_BYTES))
    rates: dict[tuple[int, int], float] = {}
    rank = dist.get_rank()
    for first in (0, 1):
        for forward in (True, False):
            dist.barrier()
            for left in range(first, len(leaders) - 1, 2):
                pair = (left, left + 1) if forward else (left + 1, left)
                source, target = leaders[pair[0]], leaders[pair[1]]
                if rank in (source, target):
                    seconds = _one_way(rank, source, target, size, device)
                    if rank == source:
                        rates[pair] = size / seconds
    told: list[Mapping[tuple[int, int], float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(told, rates)
    found = {pair: rate for one in told for pair, rate in one.items()}
    return [
        LinkRate(
            source=names[source],
            target=names[target],
            bytes_per_s=rate,
            expected_bytes_per_s=min(
                expected_rate(cluster, nodes[source]), expected_rate(cluster, nodes[target])
            ),
        )
        for (source, target), rate in sorted(found.items())
    ]


def _one_way(rank: int, source: int, target: int, size: int, device: torch.device) -> float:
    """Seconds of the fastest message until the receiver's word that it came, at its source."""
    data = torch.zeros(size, dtype=torch.uint8, device=device)
    word = torch.zeros(1, dtype=torch.uint8, device=device)
    times = []
    for _ in range(REPEATS + 1):  # the first one opens the way
        started = time.perf_counter()
        if rank == source:
            dist.send(data, target)
            dist.recv(word, target)
        else:
            dist.recv(data, source)
            dist.send(word, source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def slow_links(rates: Sequence[LinkRate]) -> list[str]:
    """A sentence for each host pair that is much slower than the plan counts on."""
    found = []
    for rate in rates:
        if not rate.is_slow:
            continue
        back = next((r for r in rates if (r.source, r.target) == (rate.target, rate.source)), rate)
        one_way = (
            " one way only: the messages may leave by another card;" if (not back.is_slow) else ""
        )
        found.append(
            f"slow link:{one_way} {rate}; check the card that GLOO_SOCKET_IFNAME or "
            "NCCL_SOCKET_IFNAME names, and what else uses the network, or plan with the measured "
            "rate"
        )
    return found
