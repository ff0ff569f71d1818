"""A mean through a codec to the messages that one rank sends and receives for it.

Two phases (Tang et al. 2021, 1-bit Adam, arXiv 2102.02888): every rank sends each other its part
as codes; who got a part takes the mean and sends the codes of that to all. The first phase goes
straight from rank to rank, whatever the algorithm is called; what an algorithm says is how the
second one gathers, and, `hierarchical`, that numbers are added up whole inside nodes before and
spread there afterwards. So of the algorithms of `collective_schedules` those of `ACTING` differ.

`executor.communication.compressed` sends these messages; `planner.traffic` counts them, and
`time_ns` says what they take, for who chooses while training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

from claw_plan.profiles.codecs import CodecDescriptor
from claw_plan.profiles.collective_algorithms import Links, gathering_rounds
from claw_plan.profiles.collective_schedules import Nodes, Steps, inside_nodes, rank_schedule

PART = 8
"""Parts begin at multiples of so many elements, so that bits fill whole bytes."""

NUMBER_BYTES = 4
"""Of an element that travels whole, in fp32."""

ACTING = ("ring", "halving_doubling", "hierarchical")
"""Algorithms by which codes travel in ways of their own."""

Message = tuple[str, int]
"""'send' or 'recv', and its bytes."""


def part_bounds(elements: int, parts: int) -> list[int]:
    """Where each part begins, as even as multiples of `PART` are, and `elements`."""
    units = -(-elements // PART)
    return [min(elements, PART * (units * part // parts)) for part in range(parts + 1)]


def part_sizes(elements: int, parts: int) -> list[int]:
    """Elements of each part."""
    return [stop - start for start, stop in pairwise(part_bounds(elements, parts))]


def own_elements(elements: int, rank: int, nodes: Nodes) -> int:
    """Of `hierarchical`: what the rank encodes of so many elements, once its node's are summed."""
    inside, _ = inside_nodes(rank, nodes)
    bounds = part_bounds(elements, inside.chunks)
    return bounds[inside.holds[1]] - bounds[inside.holds[0]]


def messages(
    codec: CodecDescriptor, algorithm: str, elements: int, rank: int, nodes: Nodes
) -> Iterator[Message]:
    """All of one rank, in their order; of codes of no fixed size the most they can be."""
    if algorithm != "hierarchical":
        yield from _two_phases(codec, algorithm, elements, rank, sum(map(len, nodes)))
        return
    inside, elsewhere = inside_nodes(rank, nodes)
    bounds = [NUMBER_BYTES * start for start in part_bounds(elements, inside.chunks)]
    yield from steps_messages(inside.down, bounds)
    if len(elsewhere) > 1:
        own = own_elements(elements, rank, nodes)
        yield from _two_phases(codec, "ring", own, elsewhere.index(rank), len(elsewhere))
    yield from steps_messages(inside.up, bounds)


def time_ns(
    codec: CodecDescriptor,
    algorithm: str,
    elements: int,
    sizes: tuple[int, ...],
    links: Links,
) -> float:
    """Nanoseconds on the wire by 'ring' or 'halving_doubling', of ranks on nodes of such sizes."""
    ranks = sum(sizes)
    wire = max(codec.wire_bytes(part) for part in part_sizes(elements, ranks))
    straight_ns = 0.0
    for senders, repeats in straight_turns(sizes):
        inside_ns = links.intra.time_ns(wire) * (senders < max(sizes))
        between_ns = links.inter.time_ns(senders * wire) * (senders > 0)
        straight_ns += repeats * max(inside_ns, between_ns)
    gathering = gathering_rounds(algorithm, sizes)
    return straight_ns + sum(one.time_ns(ranks * wire, links) for one in gathering)


@cache
def straight_turns(sizes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Of all sending to each other: (ranks of a node that send to others at once, turns of them).

    In turn k every rank sends to the k-th after its own.
    """
    node_of = [node for node, size in enumerate(sizes) for _ in range(size)]
    ranks = len(node_of)
    found = Counter[int]()
    for turn in range(1, ranks):
        leaving = Counter(
            node for rank, node in enumerate(node_of) if node_of[(rank + turn) % ranks] != node
        )
        found[max(leaving.values(), default=0)] += 1
    return tuple(sorted(found.items()))


def steps_messages(steps: Steps, bounds: Sequence[int]) -> Iterator[Message]:
    """Of a rank's rounds on chunks that begin at these bytes; nothing is no message."""
    for step in steps:
        for op, (first, stop) in (
            (("send", step.sends), ("recv", step.receives)) if step is not None else ()
        ):
            if bounds[stop] > bounds[first]:
                yield op, bounds[stop] - bounds[first]


def _two_phases(
    codec: CodecDescriptor, algorithm: str, elements: int, place: int, count: int
) -> Iterator[Message]:
    """Of the rank that is at this place of so many that all encode."""
    wires = [codec.wire_bytes(part) for part in part_sizes(elements, count)]
    for turn in range(1, count):
        sent, received = wires[(place + turn) % count], wires[place]
        yield from (message for message in (("send", sent), ("recv", received)) if message[1])
    schedule = rank_schedule(algorithm, place, (tuple(range(count)),))
    bounds = [max(wires) * part for part in range(count + 1)]
    yield from steps_messages(schedule.up, bounds)
