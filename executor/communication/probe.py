"""A short exchange of messages to what a message costs on the group's links.

`probe_links` fits latency and rate of the hops inside and between nodes; the cost model of
`profiles.collective_algorithms` wants them. `probe_pairs` measures any two ranks, and finds the
slow pair that `profiles.rank_order` sends a ring around. All ranks of the group call them and get
equal answers. Some 20 messages, of 1 MiB the largest: a second on 100 Mbit/s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from claw_plan.executor.benchmark_gloo import fit_line
from claw_plan.executor.communication.algorithms import exchange
from claw_plan.executor.communication.group import CollectiveGroup
from claw_plan.executor.errors import ExecutionError
from claw_plan.profiles.collective_algorithms import Hop, Links
from claw_plan.profiles.units import MIB, NS_PER_S

SIZES = (1 << 10, 1 << 16, 1 << 18, MIB)
REPEATS = 4
"""Rounds in a row: they begin with one another, so that one start's skew counts a fourth."""


def probe_links(group: CollectiveGroup, sizes: Sequence[int] = SIZES) -> Links:
    """Hops as a ring uses them: everybody sends to the next and receives from the one before.

    Inside nodes in all nodes at once; between nodes from one rank of each, so that the NIC is its
    alone. A level that the group does not have is taken to be like the other.
    """
    rank = group.process_group.rank()
    node = next(node for node in group.nodes if rank in node)
    leaders = [members[0] for members in group.nodes]
    intra = inter = None
    if max(len(members) for members in group.nodes) > 1:
        intra = _hop(group, node, sizes)
    if len(leaders) > 1:
        inter = _hop(group, leaders if rank in leaders else (), sizes)
    known = intra or inter
    if known is None:
        raise ExecutionError("a group of one rank has no links to measure")
    return Links(intra=intra or known, inter=inter or known)


def probe_pairs(group: CollectiveGroup, size_bytes: int = MIB) -> list[list[float]]:
    """Seconds of an exchange of so many bytes each way, between any two ranks of the group.

    Pairs that share no rank exchange at once, as in a tournament where each meets each.
    """
    ranks, own = group.process_group.size(), group.process_group.rank()
    seats = [*range(ranks), *([-1] if ranks % 2 else [])]
    seconds = torch.zeros(ranks, ranks, dtype=torch.float64)
    for _ in range(len(seats) - 1):
        partner = seats[len(seats) - 1 - seats.index(own)]
        spent = _round_s(group, _message(group, size_bytes, partner, partner))
        if partner >= 0:
            seconds[own, partner] = spent
        seats = [seats[0], seats[-1], *seats[1:-1]]
    told = seconds.to(group.device)
    dist.all_reduce(told, op=dist.ReduceOp.SUM, group=group.process_group)
    found = told.cpu()
    return torch.maximum(found, found.T).tolist()


def _hop(group: CollectiveGroup, ring: Sequence[int], sizes: Sequence[int]) -> Hop:
    """Of the slowest ring, for all ranks; a rank in none only listens to the result."""
    rank = group.process_group.rank()
    target = source = -1
    if rank in ring:
        place = list(ring).index(rank)
        target, source = ring[(place + 1) % len(ring)], ring[place - 1]
    seconds = [_round_s(group, _message(group, size, target, source)) for size in sizes]
    slowest = torch.tensor(seconds, dtype=torch.float64, device=group.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group.process_group)
    times_ns = [spent * NS_PER_S for spent in slowest.tolist()]
    latency_ns, bytes_per_s = fit_line(zip(sizes, times_ns, strict=True))
    return Hop(latency_ns=latency_ns, bytes_per_s=bytes_per_s)


def _message(
    group: CollectiveGroup, size_bytes: int, target: int, source: int
) -> Callable[[], None]:
    """So much to the target and from the source; nothing where there is none."""
    if target in (-1, group.process_group.rank()):
        return lambda: None
    sent = torch.zeros(size_bytes, dtype=torch.uint8, device=group.device)
    came = torch.empty_like(sent)
    return partial(exchange, [sent], target, [came], source, group.process_group)


def _round_s(group: CollectiveGroup, call: Callable[[], None]) -> float:
    """Seconds of one call, of several in a row; the first one warms up."""
    call()
    dist.barrier(group.process_group)
    started = time.perf_counter()
    for _ in range(REPEATS):
        call()
    if group.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / REPEATS
