"""`Traffic`: what one rank gives to torch.distributed in one step, by operation, axis and group.

Predicted from a candidate's tasks (`predict_traffic`) or counted while it trains
(`executor.traffic`); both are one noun, so that a difference can be named. plan.yaml holds the
prediction as rows, equal ranks together.

Bytes are those of full buffers, as in `profiles.work.CollectiveWork`; a message counts once where
it is sent and once where it is received. The first steps may move more: DistributedDataParallel
makes its buckets in them, and pipelines tell each other the shapes of their messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import NamedTuple

from claw_plan.planner.averaging import known_codec
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.lower import Cuts, lower
from claw_plan.planner.lower_end import WORLD
from claw_plan.planner.placement import stride_of
from claw_plan.planner.plan import PlanTraffic
from claw_plan.planner.problem import STORED_BYTES, Problem
from claw_plan.planner.shards import Place, ShardSizes
from claw_plan.planner.stage_streams import FROM_PEER, Moves
from claw_plan.planner.supported import sends_codes
from claw_plan.profiles.coded_means import messages, steps_messages
from claw_plan.profiles.collective_schedules import alike, node_sizes, rank_schedule
from claw_plan.profiles.collective_trees import pieces_of
from claw_plan.profiles.trainer import NEUTRAL
from claw_plan.profiles.work import CollectiveWork

STEADY_STEP = 3
"""From this step on every one moves the same."""


class Kind(NamedTuple):
    """An operation and the ranks that take part: those of a mesh axis, WORLD or TIED."""

    op: str
    axis: str
    group_size: int

    def __str__(self) -> str:
        return f"{self.op} over {self.axis} ({self.group_size} ranks)"


class Moved(NamedTuple):
    """How often, and how many bytes in all."""

    calls: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.calls} of {self.bytes} bytes"


Traffic = Mapping[Kind, Moved]

NOTHING = Moved(0, 0)


def predict_traffic(
    problem: Problem, shards: ShardSizes, candidate: Candidate, cuts: Cuts
) -> list[dict[Kind, Moved]]:
    """What each rank of the candidate moves in a step, as the executor trains it."""
    plain = replace(problem, trainer=NEUTRAL)
    moved = {
        place: lower(plain, shards, candidate, cuts, place=place).moved
        for place in _places(candidate)
    }

    @cache
    def counted(place: Place, stage: int, replica: int) -> dict[Kind, Moved]:
        return _counted(moved[place][stage], candidate, replica)

    ranks = []
    for rank in range(candidate.num_devices):
        at = partial(_index, candidate, rank)
        # Rounds of messages differ from replica to replica; collectives do not.
        replica = at("dp_replicate") if candidate.collective != "auto" else 0
        shard = at("dp_shard") * candidate.cp + at("cp")
        place = Place(dp_shard=shard, tp=at("tp"))
        ranks.append(counted(place, at("pp"), replica))
    return ranks


def _places(candidate: Candidate) -> list[Place]:
    indices = product(range(candidate.shard_ranks), range(candidate.tp))
    return [Place(dp_shard=shard, tp=tp) for shard, tp in indices]


def _index(candidate: Candidate, rank: int, axis: str) -> int:
    """The rank's place on an axis."""
    return rank // stride_of(candidate, axis) % int(getattr(candidate, axis))


def _counted(moves: Moves, candidate: Candidate, replica: int) -> dict[Kind, Moved]:
    found: dict[Kind, list[int]] = {}
    for axes, works in moves:
        for axis, work in zip(axes, works, strict=True):
            for op, size in _calls(work, axis, replica, candidate.codec):
                kind = Kind(op, group_of(axis, candidate), work.group_size)
                if work.op == "send":  # its work names two ranks of all that the group has
                    kind = Kind(op, "pp", candidate.pp)
                amounts = found.setdefault(kind, [0, 0])
                amounts[0] += 1
                amounts[1] += size
    return {kind: Moved(*amounts) for kind, amounts in found.items()}


def _calls(work: CollectiveWork, axis: str, replica: int, codec: str) -> Iterator[tuple[str, int]]:
    """Operation and bytes of all that a rank calls for it."""
    if work.op == "send":
        yield ("recv" if axis == FROM_PEER else "send"), work.bytes
    elif work.algorithm == "auto":
        yield work.op, work.bytes
    else:
        yield from _messages(work, replica, codec)


def _messages(work: CollectiveWork, replica: int, codec: str) -> Iterator[tuple[str, int]]:
    """What one rank sends and receives in an all-reduce by rounds of messages."""
    nodes, elements = alike(work.group_size, work.nodes), work.bytes // STORED_BYTES
    if sends_codes(codec):
        yield from messages(known_codec(codec), work.algorithm, elements, replica, nodes)
        return
    pieces = pieces_of(work.algorithm, work.bytes, node_sizes(nodes))
    schedule = rank_schedule(work.algorithm, replica, nodes, pieces)
    parts = schedule.chunks
    edges = [STORED_BYTES * (elements * part // parts) for part in range(parts + 1)]
    yield from steps_messages(schedule.all_reduce, edges)


def group_of(axis: str, candidate: Candidate) -> str:
    """The axis; for WORLD the one that all ranks lie on, if there is one: it is the same group.

    So it is for ep where all ranks share experts. Ranks that share states where sequences are
    shared too are those of cp, or all.
    """
    if axis == "dp_shard" and candidate.cp > 1:
        if candidate.dp_shard == 1:
            return "cp"
        axis = WORLD if candidate.shard_ranks == candidate.num_devices else axis
    if axis != WORLD and not (axis == "ep" and candidate.ep == candidate.num_devices):
        return axis
    sizes = {name: getattr(candidate, name) for name in candidate.mesh_order}
    return next((a for a, size in sizes.items() if size == candidate.num_devices), WORLD)


def rows_of(ranks: Sequence[Traffic]) -> list[PlanTraffic]:
    """All ranks' traffic as rows, ranks that move the same in one."""
    alike: dict[tuple[Kind, Moved], list[int]] = {}
    for rank, traffic in enumerate(ranks):
        for item in traffic.items():
            alike.setdefault(item, []).append(rank)
    return [
        PlanTraffic(
            ranks=_ranges(which),
            op=kind.op,
            axis=kind.axis,
            group_size=kind.group_size,
            calls=moved.calls,
            bytes=moved.bytes,
        )
        for (kind, moved), which in sorted(alike.items(), key=lambda item: (item[1], item[0]))
    ]


def traffic_of(rows: Iterable[PlanTraffic], num_ranks: int) -> list[dict[Kind, Moved]]:
    """What `rows_of` wrote down, for each rank."""
    found: list[dict[Kind, Moved]] = [{} for _ in range(num_ranks)]
    for row in rows:
        for rank in _ranks(row.ranks):
            kind = Kind(row.op, row.axis, row.group_size)
            found[rank][kind] = Moved(row.calls, row.bytes)
    return found


def differences(predicted: Sequence[Traffic], counted: Sequence[Traffic]) -> list[str]:
    """A line for each rank and kind of traffic of which other amounts were counted."""
    return [
        f"rank {rank}: {kind}: predicted {expected.get(kind, NOTHING)}, "
        f"counted {found.get(kind, NOTHING)}"
        for rank, (expected, found) in enumerate(zip(predicted, counted, strict=True))
        for kind in sorted({*expected, *found})
        if expected.get(kind, NOTHING) != found.get(kind, NOTHING)
    ]


def count_ranks(text: str) -> int:
    """How many ranks the text of a row stands for."""
    return sum(1 for _ in _ranks(text))


def _ranges(ranks: Sequence[int]) -> str:
    """Ascending ranks as text: '0-3' or '0,2'."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)


def _ranks(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
