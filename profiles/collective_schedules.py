"""An algorithm's name and a layout of ranks to what one rank sends and receives, round by round.

The executor runs these rounds over point-to-point messages, `collective_algorithms` counts them,
and tests play them in the simulator: one description, three readers.

A buffer is cut into chunks. First every chunk is reduced until it is whole at one rank (`down`),
then, if the algorithm does so, whole sums are exchanged (`across`), and last the first part runs
backwards with copies instead of sums: gathering is scattering played in reverse. In a round a
rank sends at most one run of chunks to one rank and receives at most one.

- `ring`: n-1 rounds around the ring, every message one n-th of the buffer.
- `tree`: a binomial tree, the whole buffer in every message; not pipelined.
- `recursive_doubling`: partners at distances 1, 2, 4, … exchange whole buffers.
- `halving_doubling`: the same partners exchange halves, quarters, …; near ranks the large parts.
- `hierarchical`: a ring inside every node, then rings between nodes of ranks of equal place.

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH", IJHPCA 19 (2005), sections 4.1 to 4.5, for all but the last; Cho et al., "BlueConnect",
SysML 2019, for the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

Nodes = tuple[tuple[int, ...], ...]
"""The group's ranks node by node; a ring runs through them in this order."""

Chunks = tuple[int, int]
"""First chunk, and the one behind the last."""

ALGORITHMS = ("ring", "tree", "recursive_doubling", "halving_doubling", "hierarchical")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one rank does in a round. `target` and `source` are -1 where it only does the other.

    What comes is added to what is there if `adds`, and else takes its place.
    """

    target: int = -1
    sends: Chunks = (0, 0)
    source: int = -1
    receives: Chunks = (0, 0)
    adds: bool = False


Steps = tuple[Step | None, ...]
"""A rank's rounds; None where it is idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSchedule:
    """One rank's part. Between `down` and `across` the chunks `holds` are whole here."""

    chunks: int
    down: Steps
    across: Steps
    holds: Chunks

    @property
    def up(self) -> Steps:
        """All ranks get what each holds."""
        return _reversed(self.down)

    @property
    def all_reduce(self) -> Steps:
        """From each rank's own numbers to the sums, everywhere."""
        return self.down + self.across + self.up


def rank_schedule(algorithm: str, rank: int, nodes: Nodes) -> RankSchedule:
    """The part of `rank`, which stands in `nodes`; with one rank there is nothing to do."""
    order = [one for node in nodes for one in node]
    place = order.index(rank)
    if algorithm == "ring":
        return _ring(place, order)
    if algorithm == "tree":
        return _tree(place, order)
    if algorithm == "hierarchical":
        return _hierarchical(rank, nodes)
    if algorithm in ("recursive_doubling", "halving_doubling"):
        return _doubling(place, order, halves=algorithm == "halving_doubling")
    raise ValueError(f"algorithm must be one of {ALGORITHMS}, but got {algorithm!r}")


def scatter_chunks(algorithm: str, nodes: Nodes) -> list[int] | None:
    """Which rank holds chunk 0, 1, … after `down`; None where some rank holds none."""
    holders: dict[int, int] = {}
    for node in nodes:
        for rank in node:
            schedule = rank_schedule(algorithm, rank, nodes)
            first, last = schedule.holds
            if last - first != 1:
                return None
            holders[first] = rank
    return [holders[chunk] for chunk in range(len(holders))]


def node_sizes(nodes: Nodes) -> tuple[int, ...]:
    """How many ranks each node has."""
    return tuple(len(node) for node in nodes)


def alike(ranks: int, nodes: int = 1) -> Nodes:
    """Ranks 0, 1, … filled into nodes as evenly as they go."""
    edges = [ranks * node // nodes for node in range(nodes + 1)]
    return tuple(tuple(range(edges[i], edges[i + 1])) for i in range(nodes))


def _ring(place: int, order: Sequence[int]) -> RankSchedule:
    parts = [(chunk, chunk + 1) for chunk in range(len(order))]
    down = _ring_scatter(place, order, parts)
    return RankSchedule(chunks=len(order), down=down, across=(), holds=parts[place])


def _ring_scatter(place: int, members: Sequence[int], parts: Sequence[Chunks]) -> Steps:
    """Every part travels once around and is whole at the member of its number."""
    size = len(members)
    after, before = members[(place + 1) % size], members[place - 1]
    return tuple(
        Step(
            target=after,
            sends=parts[(place - turn - 1) % size],
            source=before,
            receives=parts[(place - turn - 2) % size],
            adds=True,
        )
        for turn in range(size - 1)
    )


def _tree(place: int, order: Sequence[int]) -> RankSchedule:
    whole = (0, 1)
    down: list[Step | None] = []
    distance = 1
    while distance < len(order):
        step = None
        if place % (2 * distance) == distance:
            step = Step(target=order[place - distance], sends=whole)
        elif place % (2 * distance) == 0 and place + distance < len(order):
            step = Step(source=order[place + distance], receives=whole, adds=True)
        down.append(step)
        distance *= 2
    return RankSchedule(chunks=1, down=tuple(down), across=(), holds=(0, int(place == 0)))


def _doubling(place: int, order: Sequence[int], *, halves: bool) -> RankSchedule:
    """Ranks beyond the largest power of two give their numbers to the first ones and wait."""
    core = 1 << (len(order).bit_length() - 1)
    chunks = core if halves else 1
    hosts = {order[core + extra]: order[extra] for extra in range(len(order) - core)}
    down = _fold(order[place], [hosts], (0, chunks))
    if place >= core:
        idle = (None,) * (core.bit_length() - 1)
        if halves:
            return RankSchedule(chunks=chunks, down=down + idle, across=(), holds=(0, 0))
        return RankSchedule(chunks=chunks, down=down, across=idle, holds=(0, 0))
    if halves:
        steps, holds = _halving(place, order, core)
        return RankSchedule(chunks=chunks, down=down + steps, across=(), holds=holds)
    partners = [order[place ^ (1 << bit)] for bit in range(core.bit_length() - 1)]
    across = tuple(
        Step(target=one, sends=(0, 1), source=one, receives=(0, 1), adds=True) for one in partners
    )
    return RankSchedule(chunks=chunks, down=down, across=across, holds=(0, int(core == 1)))


def _halving(place: int, order: Sequence[int], core: int) -> tuple[Steps, Chunks]:
    steps = []
    low, high = 0, core
    for bit in range(core.bit_length() - 1):
        middle = (low + high) // 2
        partner = order[place ^ (1 << bit)]
        keeps, gives = (low, middle), (middle, high)
        if place & (1 << bit):
            keeps, gives = gives, keeps
        steps.append(Step(target=partner, sends=gives, source=partner, receives=keeps, adds=True))
        low, high = keeps
    return tuple(steps), (low, high)


def inside_nodes(rank: int, nodes: Nodes) -> tuple[RankSchedule, tuple[int, ...]]:
    """The rounds inside this rank's node alone, and the ranks that hold the same chunk elsewhere.

    There are as many chunks as the smallest node has ranks; the last ranks of larger nodes give
    their numbers to the first ones, hold nothing and have nobody elsewhere.
    """
    local = min(len(node) for node in nodes)
    members = next(node for node in nodes if rank in node)
    place = members.index(rank)
    folds: list[dict[int, int]] = []
    for node in nodes:
        for number, extra in enumerate(node[local:]):
            if number // local == len(folds):
                folds.append({})
            folds[number // local][extra] = node[number % local]
    down = _fold(rank, folds, (0, local))
    if place >= local:
        down += (None,) * (local - 1)
        return RankSchedule(chunks=local, down=down, across=(), holds=(0, 0)), ()
    parts = [(part, part + 1) for part in range(local)]
    down += _ring_scatter(place, members[:local], parts)
    elsewhere = tuple(node[place] for node in nodes)
    return RankSchedule(chunks=local, down=down, across=(), holds=parts[place]), elsewhere


def _hierarchical(rank: int, nodes: Nodes) -> RankSchedule:
    inside, elsewhere = inside_nodes(rank, nodes)
    count = len(nodes)
    down = tuple(step and _finer(step, count) for step in inside.down)
    chunks = inside.chunks * count
    if not elsewhere:
        down += (None,) * (count - 1)
        return RankSchedule(chunks=chunks, down=down, across=(), holds=(0, 0))
    first = inside.holds[0] * count
    parts = [(first + part, first + part + 1) for part in range(count)]
    place = elsewhere.index(rank)
    down += _ring_scatter(place, elsewhere, parts)
    return RankSchedule(chunks=chunks, down=down, across=(), holds=parts[place])


def _finer(step: Step, pieces: int) -> Step:
    """The same step where every chunk is cut into so many."""
    (a, b), (c, d) = step.sends, step.receives
    return replace(step, sends=(a * pieces, b * pieces), receives=(c * pieces, d * pieces))


def _fold(rank: int, folds: Sequence[dict[int, int]], whole: Chunks) -> Steps:
    """Ranks left over (keys) give all they have to one each (values), fold by fold."""
    steps: list[Step | None] = []
    for hosts in folds:
        guests = {host: guest for guest, host in hosts.items()}
        if rank in hosts:
            steps.append(Step(target=hosts[rank], sends=whole))
        elif rank in guests:
            steps.append(Step(source=guests[rank], receives=whole, adds=True))
        elif hosts:
            steps.append(None)
    return tuple(steps)


def _reversed(steps: Steps) -> Steps:
    """What was sent comes back, the last first."""
    return tuple(
        step
        and Step(target=step.source, sends=step.receives, source=step.target, receives=step.sends)
        for step in reversed(steps)
    )
