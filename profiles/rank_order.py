"""A matrix of link costs to an order of the ranks in which no slow link is used without need.

`ring_order` puts ranks on a ring whose slowest link is as fast as possible: a bottleneck
Hamiltonian cycle. Every round of a ring waits for its slowest link, so one slow pair costs all of
it, and a ring that goes around that pair costs nothing. `nested_order` puts ranks in groups, of
groups, …, so that the innermost talk over the fastest links: on irregular meshes (eight V100 with
one or two NVLinks, or none, between two of them) the ranks of a tensor-parallel group become
neighbours.

Exact up to `EXACT_RANKS` ranks, by dynamic programming over subsets at a threshold; beyond, by
rotations of a path (Pósa 1976), with a lower bound: a cycle needs two links at every rank and has
no rank whose loss parts the others (Parker and Rardin, "Guaranteed performance heuristics for the
bottleneck travelling salesperson problem", OR Letters 2, 1984).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from claw_plan.profiles.cluster import Node

Matrix = Sequence[Sequence[float]]
"""Costs (seconds, seconds a byte, …) from row to column. The diagonal is not read."""

EXACT_RANKS = 12
ROTATIONS = 200
"""For every rank of a path that is to be closed, before a threshold is taken for impossible."""

PARTITIONS = 20_000
"""So many ways of forming groups are all tried (8 ranks in pairs have 105)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """An order, the cost of its worst link, and what no order can go below."""

    order: tuple[int, ...]
    worst: float
    lower_bound: float

    @property
    def is_proven(self) -> bool:
        """Whether no other order has a better worst link."""
        return self.worst <= self.lower_bound


def ring_order(costs: Matrix) -> RankOrder:
    """The ring of least worst cost; ranks stay in their order where that is as good.

    A link costs what its worse direction does: sums go around one way, results the other.
    """
    size = len(costs)
    both = [[max(costs[i][j], costs[j][i]) for j in range(size)] for i in range(size)]
    plain = tuple(range(size))
    if size < 3:
        worst = both[0][1] if size == 2 else 0.0
        return RankOrder(order=plain, worst=worst, lower_bound=worst)
    bound = _ring_bound(both)
    if ring_worst(both, plain) <= bound:
        return RankOrder(order=plain, worst=ring_worst(both, plain), lower_bound=bound)
    levels = sorted({both[i][j] for i, j in combinations(plain, 2) if both[i][j] >= bound})
    find = _exact_cycle if size <= EXACT_RANKS else _rotated_cycle
    order, low, high = plain, 0, levels.index(ring_worst(both, plain))
    while low < high:  # levels[high] has a known ring
        middle = (low + high) // 2
        found = find(_neighbours(both, levels[middle]))
        if found is None:
            low = middle + 1
        else:
            order, high = found, levels.index(ring_worst(both, found))
    worst = ring_worst(both, order)
    return RankOrder(order=order, worst=worst, lower_bound=worst if size <= EXACT_RANKS else bound)


def ring_worst(costs: Matrix, order: Sequence[int]) -> float:
    """The cost of the worst link on the ring, as it is used in both directions."""
    links = [(one, order[place - 1]) for place, one in enumerate(order)]
    return max((max(costs[i][j], costs[j][i]) for i, j in links if i != j), default=0.0)


def nested_order(costs: Matrix, sizes: Sequence[int]) -> RankOrder:
    """Ranks in blocks of `sizes[0]` with the least worst ring, these in blocks of `sizes[1]`, ….

    `worst` and `lower_bound` are of the innermost blocks. Outer levels take inner ones as given;
    between two blocks counts the worst link of members of equal place. Sizes multiply to the
    number of ranks, or to a divisor of it.
    """
    blocks: list[tuple[int, ...]] = [(rank,) for rank in range(len(costs))]
    worsts: list[RankOrder] = []
    for size in sizes:
        if size < 1 or len(blocks) % size:
            raise ValueError(f"sizes divide the {len(costs)} ranks, but got {sizes=}")
        between = [[_between(costs, one, other) for other in blocks] for one in blocks]
        chosen, bound = _best_partition(between, size)
        rings = [_ring_within(between, group) for group in chosen]
        worsts.append(
            RankOrder(
                order=(), worst=max(ring_worst(between, ring) for ring in rings), lower_bound=bound
            )
        )
        blocks = [tuple(rank for index in ring for rank in blocks[index]) for ring in rings]
    first = next((one for one, size in zip(worsts, sizes, strict=True) if size > 1), None)
    order = tuple(rank for block in blocks for rank in block)
    if first is None:
        return RankOrder(order=order, worst=0.0, lower_bound=0.0)
    return RankOrder(order=order, worst=first.worst, lower_bound=first.lower_bound)


def node_costs(node: Node) -> list[list[float]]:
    """Seconds a byte between any two devices of a node, as its cluster file says."""
    count = node.device_count
    costs = [[1 / node.intra.rate("send")] * count for _ in range(count)]
    for (one, other), link in node.pairs.items():
        costs[one][other] = costs[other][one] = 1 / link.rate("send")
    return costs


def _ring_bound(both: Matrix) -> float:
    """No ring has a smaller worst cost: two links at each rank, and no rank that parts others."""
    size = len(both)
    two = max(sorted(both[i][j] for j in range(size) if j != i)[1] for i in range(size))
    levels = sorted({both[i][j] for i, j in combinations(range(size), 2) if both[i][j] >= two})
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        if _holds_without_any(_neighbours(both, levels[middle])):
            high = middle
        else:
            low = middle + 1
    return levels[low]


def _neighbours(both: Matrix, level: float) -> list[int]:
    """For each rank a mask of those it reaches at this cost at most."""
    size = len(both)
    return [
        sum(1 << j for j in range(size) if j != i and both[i][j] <= level) for i in range(size)
    ]


def _holds_without_any(neighbours: Sequence[int]) -> bool:
    every = (1 << len(neighbours)) - 1
    return all(_is_connected(neighbours, every & ~(1 << out)) for out in range(len(neighbours)))


def _is_connected(neighbours: Sequence[int], allowed: int) -> bool:
    seen = new = allowed & -allowed
    while new:
        reached = 0
        for rank in _members(new):
            reached |= neighbours[rank]
        new = reached & allowed & ~seen
        seen |= new
    return seen == allowed


def _members(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _exact_cycle(neighbours: Sequence[int]) -> tuple[int, ...] | None:
    """A cycle through all, found by which subsets have a path from rank 0 to which of them."""
    size = len(neighbours)
    ends = [0] * (1 << size)
    ends[1] = 1
    for mask in range(1, 1 << size, 2):
        for end in _members(ends[mask]):
            for rank in _members(neighbours[end] & ~mask):
                ends[mask | 1 << rank] |= 1 << rank
    mask = (1 << size) - 1
    last = ends[mask] & neighbours[0]
    path = []
    while mask != 1:
        if not last:
            return None
        rank = (last & -last).bit_length() - 1
        path.append(rank)
        mask ^= 1 << rank
        last = ends[mask] & neighbours[rank]
    return (0, *reversed(path))


def _rotated_cycle(neighbours: Sequence[int]) -> tuple[int, ...] | None:
    """A cycle by growing a path and turning its end around where it cannot grow; None: not found.

    The same answer every time: ranks must agree on it.
    """
    size = len(neighbours)
    draw = random.Random(size)
    path, inside = [0], 1
    for _ in range(ROTATIONS * size):
        end = path[-1]
        free = neighbours[end] & ~inside
        if free:
            grown = draw.choice(list(_members(free)))
            path.append(grown)
            inside |= 1 << grown
        elif len(path) == size and neighbours[end] >> path[0] & 1:
            start = path.index(0)
            return (*path[start:], *path[:start])
        else:
            turn = draw.choice(
                [i for i, rank in enumerate(path) if neighbours[end] >> rank & 1] or [0]
            )
            path[turn + 1 :] = reversed(path[turn + 1 :])
    return None


def _between(costs: Matrix, one: Sequence[int], other: Sequence[int]) -> float:
    return max(max(costs[i][j], costs[j][i]) for i, j in zip(one, other, strict=True))


def _ring_within(costs: Matrix, group: Sequence[int]) -> tuple[int, ...]:
    inside = [[costs[i][j] for j in group] for i in group]
    return tuple(group[place] for place in ring_order(inside).order)


def _best_partition(costs: Matrix, size: int) -> tuple[list[tuple[int, ...]], float]:
    """Groups of least worst ring, and a bound of it: exact where all ways can be tried."""
    count = len(costs)
    known: dict[tuple[int, ...], float] = {}

    def worst(group: tuple[int, ...]) -> float:
        if group not in known:
            known[group] = ring_worst(costs, _ring_within(costs, group))
        return known[group]

    plain = [tuple(range(first, first + size)) for first in range(0, count, size)]
    if size in (1, count):
        return plain, max(worst(group) for group in plain)
    if _num_partitions(count, size) <= PARTITIONS:
        best = min(_partitions(tuple(range(count)), size), key=lambda one: max(map(worst, one)))
        if max(map(worst, best)) >= max(map(worst, plain)):
            best = plain
        return best, max(map(worst, best))
    bound = max(min(row[j] for j in range(count) if j != i) for i, row in enumerate(costs))
    return _exchanged(plain, worst), bound


def _num_partitions(count: int, size: int) -> int:
    """n!/(g!^(n/g) (n/g)!) by choosing the first rank's companions, then the next one's."""
    ways = 1
    for left in range(count, 0, -size):
        for place in range(1, size):
            ways = ways * (left - place) // place
    return ways


def _partitions(ranks: tuple[int, ...], size: int) -> Iterator[list[tuple[int, ...]]]:
    if not ranks:
        yield []
        return
    for others in combinations(ranks[1:], size - 1):
        rest = tuple(rank for rank in ranks[1:] if rank not in others)
        for groups in _partitions(rest, size):
            yield [(ranks[0], *others), *groups]


def _exchanged(
    groups: list[tuple[int, ...]], worst: Callable[[tuple[int, ...]], float]
) -> list[tuple[int, ...]]:
    """Members change places as long as the worse of two groups gets better by it."""
    improved = True
    while improved:
        improved = False
        for a, b in combinations(range(len(groups)), 2):
            before = sorted((worst(groups[a]), worst(groups[b])), reverse=True)
            for x in groups[a]:
                for y in groups[b]:
                    one = tuple(sorted((*(r for r in groups[a] if r != x), y)))
                    other = tuple(sorted((*(r for r in groups[b] if r != y), x)))
                    if sorted((worst(one), worst(other)), reverse=True) < before:
                        groups[a], groups[b], improved = one, other, True
                        break
                if improved:
                    break
            if improved:
                break
    return groups
