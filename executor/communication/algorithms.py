"""All-reduce, reduce-scatter and all-gather of a flat tensor, by the rounds of an algorithm.

Runs `profiles.collective_schedules` over `batch_isend_irecv`, on any backend, with any number of
ranks and any length. All ranks end with equal bits, because every sum is made once and copied, or
made by both partners of the same two numbers. Another algorithm adds in another order: its last
bits differ. Sums are made in the tensor's dtype, as NCCL's and gloo's are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from claw_plan.executor.errors import ExecutionError
from claw_plan.profiles.collective_schedules import (
    ALGORITHMS,
    Nodes,
    RankSchedule,
    Steps,
    node_sizes,
    rank_schedule,
    scatter_chunks,
)
from claw_plan.profiles.collective_trees import HALF_BYTES, pieces_of

NATIVE = "native"
"""The backend's own collective."""

NAMES = (*ALGORITHMS, NATIVE)

Exchange = Callable[[Sequence[Tensor], int, Sequence[Tensor], int, dist.ProcessGroup], None]
"""What `exchange` is, and what can stand in its place."""


def flat_nodes(group: dist.ProcessGroup) -> Nodes:
    """All ranks of the group as one node, in their order."""
    return (tuple(range(group.size())),)


def all_reduce(
    flat: Tensor,
    group: dist.ProcessGroup,
    algorithm: str,
    nodes: Nodes | None = None,
    carry: Exchange | None = None,
    half_bytes: float = HALF_BYTES,
) -> None:
    """Replaces `flat`, contiguous and of one dimension, by the sum over the group's ranks.

    `nodes` are group ranks by node; None takes all as one node. `carry` moves messages instead of
    `exchange`, but none of the backend's own. `half_bytes` are what the links carry while a
    message starts; by them a tree's chunks are cut, so all ranks give the same.
    """
    if algorithm == NATIVE:
        dist.all_reduce(flat, group=group)
        return
    nodes = nodes or flat_nodes(group)
    pieces = pieces_of(algorithm, flat.nbytes, node_sizes(nodes), half_bytes)
    schedule = schedule_of(algorithm, group.rank(), nodes, pieces)
    bounds = even_bounds(flat.numel(), schedule.chunks)
    run_steps(flat, schedule.all_reduce, bounds, group, carry or exchange)


def reduce_scatter(
    flat: Tensor, group: dist.ProcessGroup, algorithm: str, nodes: Nodes | None = None
) -> Tensor:
    """The sum's part of this rank: the `even_bounds` of `flat` over the ranks. `flat` is kept."""
    bounds = even_bounds(flat.numel(), group.size())
    rank = group.rank()
    if algorithm == NATIVE:
        part = flat.new_empty(max(_sizes(bounds)))
        dist.reduce_scatter_single(part, _padded(flat, bounds), group=group)
        return part[: bounds[rank + 1] - bounds[rank]]
    nodes = nodes or flat_nodes(group)
    schedule, holders = schedule_of(algorithm, rank, nodes), _holders(algorithm, nodes)
    parts = [flat[bounds[holder] : bounds[holder + 1]] for holder in holders]
    staged, staged_bounds = torch.cat(parts), _bounds_of([len(part) for part in parts])
    run_steps(staged, schedule.down, staged_bounds, group)
    chunk = schedule.holds[0]
    return staged[staged_bounds[chunk] : staged_bounds[chunk + 1]].clone()


def all_gather(
    part: Tensor,
    numel: int,
    group: dist.ProcessGroup,
    algorithm: str,
    nodes: Nodes | None = None,
) -> Tensor:
    """The whole of `numel` elements, of which `part` is this rank's `even_bounds` part."""
    bounds = even_bounds(numel, group.size())
    rank = group.rank()
    if len(part) != bounds[rank + 1] - bounds[rank]:
        raise ExecutionError(
            f"rank {rank} holds {bounds[rank + 1] - bounds[rank]} of {numel} elements among "
            f"{group.size()} ranks, but gave {len(part)}"
        )
    if algorithm == NATIVE:
        return _native_all_gather(part, bounds, group)
    nodes = nodes or flat_nodes(group)
    schedule, holders = schedule_of(algorithm, rank, nodes), _holders(algorithm, nodes)
    staged_bounds = _bounds_of([bounds[holder + 1] - bounds[holder] for holder in holders])
    staged = part.new_empty(numel)
    chunk = schedule.holds[0]
    staged[staged_bounds[chunk] : staged_bounds[chunk + 1]] = part
    run_steps(staged, schedule.up, staged_bounds, group)
    if holders == list(range(group.size())):
        return staged
    chunk_of = {holder: chunk for chunk, holder in enumerate(holders)}
    return torch.cat(
        [
            staged[staged_bounds[chunk_of[one]] : staged_bounds[chunk_of[one] + 1]]
            for one in range(group.size())
        ]
    )


def all_to_all(
    parts: Sequence[Tensor],
    sizes: Sequence[int],
    group: dist.ProcessGroup,
    members: Sequence[int],
) -> list[Tensor]:
    """Part i goes to member i; answers with what each had for this one, `sizes[i]` elements.

    `members` are ranks of the group. Round k goes to the k-th of them after this one, so that none
    is everybody's target at once.
    """
    place, count = list(members).index(group.rank()), len(members)
    found = [parts[place].new_empty(size) for size in sizes]
    found[place] = parts[place]
    for turn in range(1, count):
        target, source = (place + turn) % count, (place - turn) % count
        exchange([parts[target]], members[target], [found[source]], members[source], group)
    return found


def exchange(
    sent: Sequence[Tensor],
    target: int,
    received: Sequence[Tensor],
    source: int,
    group: dist.ProcessGroup,
) -> None:
    """Messages to one rank and from one, all at once; empty tensors are left out by both ends.

    Receives come first: gloo tells the sender of each by the socket that also carries what is
    sent to it, and behind a message the word would arrive with its last byte. Two partners'
    messages then went one after the other.
    """
    operations = [
        dist.P2POp(dist.irecv, message, group=group, group_peer=source)
        for message in received
        if message.numel()
    ] + [
        dist.P2POp(dist.isend, message, group=group, group_peer=target)
        for message in sent
        if message.numel()
    ]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def even_bounds(numel: int, parts: int) -> list[int]:
    """Where each of the parts begins, and `numel`: sizes differ by one element at most."""
    return [numel * part // parts for part in range(parts + 1)]


def run_steps(
    flat: Tensor,
    steps: Steps,
    bounds: Sequence[int],
    group: dist.ProcessGroup,
    carry: Exchange = exchange,
) -> None:
    """The rounds of this rank on the chunks that `bounds` cut `flat` into."""
    added = [bounds[s.receives[1]] - bounds[s.receives[0]] for s in steps if s and s.adds]
    scratch = flat.new_empty(max(added, default=0))
    for step in steps:
        if step is None:
            continue
        place = flat[bounds[step.receives[0]] : bounds[step.receives[1]]]
        came = scratch[: len(place)] if step.adds else place
        sent = flat[bounds[step.sends[0]] : bounds[step.sends[1]]]
        carry([sent], step.target, [came], step.source, group)
        if step.adds:
            place.add_(came)


@lru_cache(maxsize=1024)
def schedule_of(algorithm: str, rank: int, nodes: Nodes, pieces: int = 1) -> RankSchedule:
    """As `rank_schedule`, remembered. Raises ExecutionError for a name that is none."""
    if algorithm not in ALGORITHMS:
        raise ExecutionError(f"there is no collective {algorithm!r}; choose one of {NAMES}")
    return rank_schedule(algorithm, rank, nodes, pieces)


@lru_cache(maxsize=1024)
def _holders(algorithm: str, nodes: Nodes) -> list[int]:
    schedule_of(algorithm, nodes[0][0], nodes)  # says what is wrong with the name
    holders = scatter_chunks(algorithm, nodes)
    if holders is None:
        ranks = sum(len(node) for node in nodes)
        need = {
            "halving_doubling": f"a power of two of ranks, but the group has {ranks}",
            "hierarchical": f"nodes of equal size, but they have {[len(node) for node in nodes]}",
        }.get(algorithm, "an all_reduce: it leaves no part of the sum with every rank")
        raise ExecutionError(
            f"scattering or gathering alone by {algorithm} needs {need}; use ring or native"
        )
    return holders


def _bounds_of(sizes: Sequence[int]) -> list[int]:
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    return bounds


def _sizes(bounds: Sequence[int]) -> list[int]:
    return [end - begin for begin, end in pairwise(bounds)]


def _padded(flat: Tensor, bounds: Sequence[int]) -> Tensor:
    """Parts of one size, as native collectives want them."""
    sizes = _sizes(bounds)
    if len(set(sizes)) == 1:
        return flat
    padded = flat.new_zeros(len(sizes), max(sizes))
    for row, begin, size in zip(padded, bounds, sizes, strict=False):
        row[:size] = flat[begin : begin + size]
    return padded.view(-1)


def _native_all_gather(part: Tensor, bounds: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    sizes = _sizes(bounds)
    own = part.new_zeros(max(sizes))
    own[: len(part)] = part
    whole = part.new_empty(len(sizes) * len(own))
    dist.all_gather_single(whole, own, group=group)
    if len(set(sizes)) == 1:
        return whole
    rows = whole.view(len(sizes), -1)
    return torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])
