"""An algorithm's name and a layout of ranks to what one rank sends and receives, round by round.

The executor runs these rounds over point-to-point messages, `collective_algorithms` counts them,
and tests play them in the simulator: one description, three readers.

A buffer is cut into chunks. First every chunk is reduced until it is whole at one rank (`down`),
then, if the algorithm does so, whole sums are exchanged (`across`), and last the first part runs
backwards with copies instead of sums: gathering is scattering played in reverse. In a round a
rank sends at most one run of chunks to one rank and receives at most one.

- `ring`: n-1 rounds around the ring, every message one n-th of the buffer.
- `tree`: a ring inside every node, then two trees between nodes of ranks of equal place, each for
  one half of what is there, in several chunks (`collective_trees`); on one node the trees alone.
  In one chunk it is a binomial tree over all ranks, with whole buffers.
- `recursive_doubling`: partners at distances 1, 2, 4, … exchange whole buffers.
- `halving_doubling`: the same partners exchange halves, quarters, …; near ranks the large parts.
- `hierarchical`: a ring inside every node, then rings between nodes of ranks of equal place.

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH", IJHPCA 19 (2005), sections 4.1 to 4.5, for all but the last and trees in chunks; Cho et
al., "BlueConnect", SysML 2019, for the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from claw_plan.profiles.collective_trees import double_tree, root_of

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


def rank_schedule(algorithm: str, rank: int, nodes: Nodes, pieces: int = 1) -> RankSchedule:
    """The part of `rank`, which stands in `nodes`; with one rank there is nothing to do.

    `pieces` are the chunks of a tree, 1 or an even number (`collective_trees.pieces_of`).
    """
    order = [one for node in nodes for one in node]
    place = order.index(rank)
    if algorithm == "ring":
        return _ring(place, order)
    if algorithm == "tree":
        return _tree(place, order) if pieces == 1 else _double_tree(rank, nodes, pieces)
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


def _tree_down(place: int, members: Sequence[int], first: int, count: int) -> tuple[Steps, Chunks]:
    """Two trees over the members, each with so many chunks from `first` on; what is whole here."""
    edges = double_tree(len(members))
    last = max((edge.first_round for edge in edges), default=-1) + 2 * (count - 1)
    steps: list[Step | None] = [None] * (last + 1)
    for edge in edges:
        if place not in (edge.child, edge.parent):
            continue
        for chunk in range(count):
            turn, part = edge.first_round + 2 * chunk, first + edge.tree * count + chunk
            step, moved = steps[turn] or Step(), (part, part + 1)
            if place == edge.child:
                step = replace(step, target=members[edge.parent], sends=moved)
            else:
                step = replace(step, source=members[edge.child], receives=moved, adds=True)
            steps[turn] = step
    own = [tree for tree in (0, 1) if root_of(tree, len(members)) == place]
    holds = (first + own[0] * count, first + (own[-1] + 1) * count) if own else (0, 0)
    return tuple(steps), holds


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
    def ring(place: int, members: Sequence[int], first: int) -> tuple[Steps, Chunks]:
        parts = [(first + part, first + part + 1) for part in range(len(members))]
        return _ring_scatter(place, members, parts), parts[place]

    return _two_levels(rank, nodes, len(nodes), ring)


def _double_tree(rank: int, nodes: Nodes, pieces: int) -> RankSchedule:
    def trees(place: int, members: Sequence[int], first: int) -> tuple[Steps, Chunks]:
        return _tree_down(place, members, first, pieces // 2)

    if len(nodes) == 1:
        nodes = tuple((one,) for one in nodes[0])
    return _two_levels(rank, nodes, pieces, trees)


def _two_levels(
    rank: int,
    nodes: Nodes,
    pieces: int,
    between: Callable[[int, Sequence[int], int], tuple[Steps, Chunks]],
) -> RankSchedule:
    """A ring inside nodes, then what `between` does with a place among ranks and a first chunk.

    Every part of a node is cut into so many pieces for it.
    """
    inside, elsewhere = inside_nodes(rank, nodes)
    down = tuple(step and _finer(step, pieces) for step in inside.down)
    chunks = inside.chunks * pieces
    if not elsewhere:
        outer, _ = between(0, range(len(nodes)), 0)  # for the number of its rounds
        down += (None,) * len(outer)
        return RankSchedule(chunks=chunks, down=down, across=(), holds=(0, 0))
    outer, holds = between(elsewhere.index(rank), elsewhere, inside.holds[0] * pieces)
    return RankSchedule(chunks=chunks, down=down + outer, across=(), holds=holds)


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
