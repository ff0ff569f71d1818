"""So many ranks to two trees over all of them, and when each edge carries its first chunk.

A rank that has children in one tree has none in the other, so both together use every port in
both directions where one tree leaves half of them idle. Each tree takes one half of the buffer in
chunks, one every second round. `collective_schedules` makes rounds of it, towards the roots and
back; `pieces_of` says how many chunks are best.

Edges are of two colours, even rounds and odd ones, so that no rank sends or receives twice in a
round: a graph of senders and receivers with two edges at most at each can be coloured so, along
its paths and cycles. Source: Sanders, Speck, Traeff, "Two-tree algorithms for full bandwidth
broadcast, reduction and scan", Parallel Computing 35 (2009). The trees are those of NCCL's
`ncclGetDtree`: in order by lowest set bits, the second one mirrored, of an odd number shifted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, product

HALF_BYTES = 128 << 10
"""What a link carries in the time in which a message starts (Hockney's n½), where nobody has
measured it: 4.5 ms at 24 MB/s between shaped hosts. An error of four times makes two of chunks."""

MOST_PIECES = 1024
"""So that a schedule stays small; what more would bring is below 2 % to 1,024 ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """From a child's place to its parent's in a tree (0 or 1); chunk i in `first_round` + 2i."""

    child: int
    parent: int
    tree: int
    first_round: int = 0


@lru_cache(maxsize=256)
def double_tree(ranks: int) -> tuple[Edge, ...]:
    """The edges of both trees over places 0, 1, …; of all colourings one of the fewest rounds."""
    edges = [
        Edge(child=_place(node, tree, ranks), parent=_place(_above(node, ranks), tree, ranks),
             tree=tree)
        for tree in (0, 1)
        for node in range(1, ranks)
    ]  # fmt: skip
    colours, parts = _coloured(edges)
    tried = [
        _timed(edges, [colour ^ flips[part] for colour, part in zip(colours, parts, strict=True)])
        for flips in product((0, 1), repeat=max(parts, default=-1) + 1)
    ]
    return min(tried, key=lambda found: (rounds_down(found), sum(e.first_round for e in found)))


def root_of(tree: int, ranks: int) -> int:
    """The place of a tree's root."""
    return _place(0, tree, ranks)


@lru_cache(maxsize=256)
def fill_rounds(ranks: int) -> int:
    """Rounds to the root beyond two for each chunk; -1 of two ranks, whose one chunk takes one."""
    return rounds_down(double_tree(ranks)) - 2


def rounds_down(edges: Sequence[Edge]) -> int:
    """Until one chunk of each tree is whole, if no rank waits for a round to end elsewhere."""
    ready: dict[int, int] = defaultdict(int)
    by_round = sorted(edges, key=lambda edge: edge.first_round)
    for _, together in groupby(by_round, key=lambda edge: edge.first_round):
        now = list(together)
        ends = [max(ready[edge.child], ready[edge.parent]) + 1 for edge in now]
        for edge, end in zip(now, ends, strict=True):
            for place in (edge.child, edge.parent):
                ready[place] = max(ready[place], end)
    return max(ready.values(), default=0)


def pieces_of(
    algorithm: str, size_bytes: int, node_sizes: Sequence[int], half_bytes: float = HALF_BYTES
) -> int:
    """Into how many chunks the buffer of a `tree` is best cut, on links alike; 1 of others.

    1 is one tree with whole buffers, 2⌈log₂n⌉ rounds of them; 2k are k for each of two trees,
    2(2k + c) rounds of an M/2k-th, c being `fill_rounds`; n ranks of one node, or nodes. Of a
    message's time its start is as much as `half_bytes`, so the best k is the square root of c·M
    over four times these.
    """
    spanned = len(node_sizes) if len(node_sizes) > 1 else sum(node_sizes)
    if algorithm != "tree" or spanned < 2:
        return 1
    start, fill = max(1.0, half_bytes), fill_rounds(spanned)
    best = math.sqrt(max(0, fill) * size_bytes / start) / 2
    halves = {min(max(1, count), MOST_PIECES // 2) for count in (int(best), math.ceil(best))}

    def bytes_of_time(pieces: int) -> float:
        rounds = math.ceil(math.log2(spanned)) if pieces == 1 else pieces + fill
        return rounds * (start + size_bytes / pieces)

    return min([1, *sorted(2 * count for count in halves)], key=bytes_of_time)


def _above(node: int, ranks: int) -> int:
    """The parent in the first tree: the lowest set bit moves up, if there is such a node."""
    bit = node & -node
    up = (node ^ bit) | (bit << 1)
    return up if up < ranks else node ^ bit


def _place(node: int, tree: int, ranks: int) -> int:
    if tree == 0:
        return node
    return ranks - 1 - node if ranks % 2 == 0 else (node - 1) % ranks


def _coloured(edges: Sequence[Edge]) -> tuple[list[int], list[int]]:
    """Each edge's colour, and which connected part it is of; parts can be flipped alone."""
    at: dict[tuple[str, int], list[int]] = defaultdict(list)
    for number, edge in enumerate(edges):
        at["child", edge.child].append(number)
        at["parent", edge.parent].append(number)
    colours, parts, part = [-1] * len(edges), [-1] * len(edges), -1
    for number in range(len(edges)):
        if colours[number] >= 0:
            continue
        part, waiting = part + 1, [(number, 0)]
        while waiting:
            one, colour = waiting.pop()
            if colours[one] >= 0:
                continue
            colours[one], parts[one] = colour, part
            beside = at["child", edges[one].child] + at["parent", edges[one].parent]
            waiting += [(other, 1 - colour) for other in beside if other != one]
    return colours, parts


def _timed(edges: Sequence[Edge], colours: Sequence[int]) -> tuple[Edge, ...]:
    """Each edge as early as what its child waits for and the colour let it."""
    below: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, edge in enumerate(edges):
        below[edge.parent, edge.tree].append(number)
    first: dict[int, int] = {}

    def round_of(number: int) -> int:
        if number not in first:
            edge = edges[number]
            free = max((round_of(one) + 1 for one in below[edge.child, edge.tree]), default=0)
            first[number] = free + (free + colours[number]) % 2
        return first[number]

    return tuple(replace(edge, first_round=round_of(number)) for number, edge in enumerate(edges))
