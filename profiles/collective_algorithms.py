"""What each algorithm of an all-reduce costs on given links, and which costs least.

The rounds of `collective_schedules` are counted: a round lasts its link's latency and the bytes of
its busiest port over the port's rate. Ports are full duplex; ranks of a node share its NIC.

    ring                2(n-1)·a + 2(n-1)/n·M·b
    tree                2·⌈log₂n⌉·(a + M·b) of whole buffers, 2(2k+c)·(a + M·b/2k) in 2k chunks,
                        between nodes after rings inside them
    recursive_doubling  log₂n·(a + M·b)                  and 2(a + M·b) if n is no power of two
    halving_doubling    2·log₂n·a + 2(n-1)/n·M·b         likewise, with n the power of two below
    hierarchical        2(g-1)·a + 2(g-1)/g·M·b inside nodes of g, then 2(r-1)·A + 2(r-1)/r·M·B
                        between r nodes, each over its one NIC

M bytes; a, A seconds a message, b, B seconds a byte, inside and between nodes; c and the best k in
`collective_trees`. Source: Thakur, Rabenseifner, Gropp, IJHPCA 19 (2005), sections 4.1 to 4.5.
Assumes: links alike at each level, no other traffic; adding up costs nothing. Not modelled: rounds
that overlap. Where node sizes are no powers of two, the partners of the doublings, and of a tree
of whole buffers, cross nodes in some pairs and not in others, and ranks that are through begin the
next round; played in the simulator, the time is then up to 14 % longer or 25 % shorter (8 ranks on
3 nodes, 12 on 5); else the formulas are exact.

On one level the ring is best for long buffers, together with `halving_doubling` on powers of two,
which has fewer rounds; `recursive_doubling` is best for the shortest. Between them a tree is best
where many meet that are no power of two: with n½ what a link carries while a message starts, 100
ranks from 49 to 197 n½, 12 nodes of 8 from 0.1 to 2.8, 100 nodes of 8 from 0.1 to 197, where
rings between nodes have too many rounds. Low bandwidth alone favours what moves the fewest bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter

from claw_plan.profiles.collective_schedules import (
    ALGORITHMS,
    Nodes,
    RankSchedule,
    Step,
    Steps,
    inside_nodes,
    rank_schedule,
)
from claw_plan.profiles.collective_trees import fill_rounds, pieces_of
from claw_plan.profiles.units import NS_PER_S

_ALL = attrgetter("all_reduce")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """A message's way: what it costs before its bytes, and the port's rate in one direction."""

    latency_ns: float
    bytes_per_s: float

    def time_ns(self, size_bytes: float) -> float:
        """One message, or several at once of so many bytes together."""
        return self.latency_ns + size_bytes * NS_PER_S / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The ways of a group: between ranks of a node, and from node to node over one shared NIC."""

    intra: Hop
    inter: Hop

    def half_bytes(self, num_nodes: int) -> float:
        """What goes over the slower way in the time in which a message starts."""
        hop = self.inter if num_nodes > 1 else self.intra
        return hop.latency_ns * hop.bytes_per_s / NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """`repeats` rounds, in each of which the busiest ports carry so much of the buffer.

    `inside` and `between` are parts of the buffer; a part of 0 is a level without messages.
    """

    repeats: int
    inside: float
    between: float

    def time_ns(self, size_bytes: int, links: Links) -> float:
        """All repeats."""
        times = [
            hop.time_ns(part * size_bytes)
            for part, hop in ((self.inside, links.intra), (self.between, links.inter))
            if part
        ]
        return self.repeats * max(times, default=0.0)


def time_ns(algorithm: str, size_bytes: int, node_sizes: Sequence[int], links: Links) -> float:
    """Nanoseconds of an all-reduce of ranks that fill nodes of these sizes."""
    half_bytes = links.half_bytes(len(node_sizes))
    pieces = pieces_of(algorithm, size_bytes, node_sizes, half_bytes)
    rounds = rounds_of(algorithm, tuple(node_sizes), pieces)
    return sum(one.time_ns(size_bytes, links) for one in rounds)


def fastest(size_bytes: int, node_sizes: Sequence[int], links: Links) -> str:
    """The algorithm of the least time; of equal ones that which `ALGORITHMS` names first."""
    return min(ALGORITHMS, key=lambda name: time_ns(name, size_bytes, node_sizes, links))


@lru_cache(maxsize=4096)
def rounds_of(algorithm: str, node_sizes: tuple[int, ...], pieces: int = 1) -> tuple[Round, ...]:
    """The rounds of an all-reduce; `pieces` are the chunks of a tree."""
    ranks, nodes = sum(node_sizes), len(node_sizes)
    if ranks == 1:
        return ()
    if algorithm == "ring":
        part = 1 / ranks
        inside = part if max(node_sizes) > 1 else 0.0
        return (Round(repeats=2 * (ranks - 1), inside=inside, between=part * (nodes > 1)),)
    if algorithm == "hierarchical" and len(set(node_sizes)) == 1:
        local = node_sizes[0]
        inner = Round(repeats=2 * (local - 1), inside=1 / local, between=0.0)
        outer = Round(repeats=2 * (nodes - 1), inside=0.0, between=1 / nodes)
        return tuple(one for one in (inner, outer) if one.repeats)
    if pieces > 1:
        return _pipelined(node_sizes, pieces)
    filled = _filled(node_sizes)
    return _counted(_schedules(algorithm, filled), filled, _ALL)


def _pipelined(node_sizes: tuple[int, ...], pieces: int) -> tuple[Round, ...]:
    """Of rings inside nodes and two trees between them, or between the ranks of one."""
    ranks, nodes = sum(node_sizes), len(node_sizes)
    part, spanned = 1 / pieces, nodes if nodes > 1 else ranks
    trees = Round(
        repeats=2 * (pieces + fill_rounds(spanned)),
        inside=part * (nodes == 1),
        between=part * (nodes > 1),
    )
    inside = node_rounds(node_sizes) if nodes > 1 else ()
    return (*inside, trees, *inside)


@lru_cache(maxsize=4096)
def gathering_rounds(algorithm: str, node_sizes: tuple[int, ...]) -> tuple[Round, ...]:
    """Those in which every rank's part comes to all; `ring`, or doubling on powers of two."""
    ranks, nodes = sum(node_sizes), len(node_sizes)
    if algorithm == "ring":
        inside = (max(node_sizes) > 1) / ranks
        return (Round(repeats=ranks - 1, inside=inside, between=(nodes > 1) / ranks),)
    filled = _filled(node_sizes)
    return _counted(_schedules(algorithm, filled), filled, attrgetter("up"))


@lru_cache(maxsize=4096)
def node_rounds(node_sizes: tuple[int, ...]) -> tuple[Round, ...]:
    """The first of `hierarchical`: after them every node's sums lie with its ranks, in parts."""
    if len(set(node_sizes)) == 1:
        local = node_sizes[0]
        return (Round(repeats=local - 1, inside=1 / local, between=0.0),) * (local > 1)
    filled = _filled(node_sizes)
    parts = [inside_nodes(rank, filled)[0] for rank in range(sum(node_sizes))]
    return _counted(parts, filled, attrgetter("down"))


def _filled(node_sizes: Sequence[int]) -> Nodes:
    ranks = iter(range(sum(node_sizes)))
    return tuple(tuple(next(ranks) for _ in range(size)) for size in node_sizes)


def _schedules(algorithm: str, nodes: Nodes) -> list[RankSchedule]:
    return [rank_schedule(algorithm, rank, nodes) for node in nodes for rank in node]


def _counted(
    parts: Sequence[RankSchedule], nodes: Nodes, steps_of: Callable[[RankSchedule], Steps]
) -> tuple[Round, ...]:
    """What every rank sends, round by round, in those that are asked for."""
    node_of = [index for index, node in enumerate(nodes) for _ in node]
    schedules, chunks = [steps_of(part) for part in parts], parts[0].chunks
    return tuple(
        _busiest([steps[turn] for steps in schedules], node_of, chunks)
        for turn in range(len(schedules[0]))
    )


def _busiest(steps: Sequence[Step | None], node_of: Sequence[int], chunks: int) -> Round:
    """One round, of which `steps` are the ranks' parts."""
    inside = 0
    leaving, coming = Counter[int](), Counter[int]()
    for rank, step in enumerate(steps):
        if step is None or step.target < 0:
            continue
        sent = step.sends[1] - step.sends[0]
        source, target = node_of[rank], node_of[step.target]
        if source == target:
            inside = max(inside, sent)
        else:
            leaving[source] += sent
            coming[target] += sent
    between = max([0, *leaving.values(), *coming.values()])
    return Round(repeats=1, inside=inside / chunks, between=between / chunks)
