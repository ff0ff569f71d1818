"""An all-reduce by rounds of messages, as `executor.communication` runs it, to what it costs.

`profiles.collective_algorithms` counts each algorithm's rounds; here each round lasts as long as
the cost model says of its messages, inside nodes and between them, and the whole becomes one
flow over the link that carries most of it. Of a ring one rank of a node sends to the next node at
a time, of the other algorithms all of them. On gloo a rank asks for a message when its round
begins, so the round waits for the word and then for the message. `coded_rounds` reckons means
through codecs so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

from claw_plan.planner.problem import Problem
from claw_plan.profiles.collective_algorithms import Round, rounds_of
from claw_plan.profiles.collective_schedules import alike, node_sizes
from claw_plan.profiles.collective_trees import pieces_of
from claw_plan.profiles.cost import CollectiveCost
from claw_plan.profiles.units import NS_PER_S
from claw_plan.profiles.work import CollectiveWork

ADDED_BYTES = 12
"""Bytes moved for each element that a rank adds to its own: two read, one written, in fp32."""


class Messages(NamedTuple):
    """Rounds alike: their number, and the largest message inside a node and between two.

    So many ranks of a node send to others at once.
    """

    repeats: int
    inside_bytes: float
    between_bytes: float
    senders: int


class _Level(NamedTuple):
    """All rounds over one kind of link: their starts, their flow, and the bytes of one rank."""

    latency_ns: int
    flow_ns: int
    rank_bytes: float

    def and_then(self, other: _Level) -> _Level:
        """Both."""
        return _Level(
            self.latency_ns + other.latency_ns,
            self.flow_ns + other.flow_ns,
            self.rank_bytes + other.rank_bytes,
        )


def all_reduce_by(
    problem: Problem, algorithm: str, size_bytes: int, ranks: int, nodes: int
) -> CollectiveCost:
    """Of gradients over so many ranks on so many nodes."""
    local = -(-ranks // nodes)
    work = CollectiveWork(
        op="all_reduce", bytes=size_bytes, group_size=ranks, nodes=nodes,
        backend=problem.cluster.backend, algorithm=algorithm,
    )  # fmt: skip
    rounds = messages_of(
        algorithm, _rounds(algorithm, size_bytes, ranks, nodes), size_bytes, local
    )
    return flow_of(problem, rounds, local, algorithm, (work,))


@cache
def _rounds(algorithm: str, size_bytes: int, ranks: int, nodes: int) -> tuple[Round, ...]:
    sizes = node_sizes(alike(ranks, nodes))
    return rounds_of(algorithm, sizes, pieces_of(algorithm, size_bytes, sizes))


def messages_of(
    algorithm: str, rounds: Sequence[Round], size_bytes: int, local: int
) -> list[Messages]:
    """Of a buffer of so many bytes, where so many ranks are on a node."""
    senders = 1 if algorithm == "ring" else local
    return [
        Messages(one.repeats, one.inside * size_bytes, one.between * size_bytes / senders, senders)
        for one in rounds
    ]


def flow_of(
    problem: Problem,
    rounds: Iterable[Messages],
    local: int,
    algorithm: str,
    moves: tuple[CollectiveWork, ...],
) -> CollectiveCost:
    """All rounds as one flow; `local` ranks of a node divide what it sends."""
    levels = {"intra": _Level(0, 0, 0.0), "inter": _Level(0, 0, 0.0)}
    source = ""
    for one in rounds:
        link, level, source = _lasts(problem, one, local)
        levels[link] = levels[link].and_then(level)
    link = max(levels, key=lambda name: levels[name].flow_ns)
    other = levels["intra" if link == "inter" else "inter"]
    flow_ns, sent = max(1, levels[link].flow_ns), max(1, math.ceil(levels[link].rank_bytes))
    return CollectiveCost(
        latency_ns=levels[link].latency_ns + other.latency_ns + other.flow_ns,
        bytes=sent,
        rate_cap_bytes_per_s=sent * NS_PER_S / flow_ns,
        link=link,
        source=source,
        algorithm=algorithm,
        moves=moves,
    )


def _lasts(problem: Problem, one: Messages, local: int) -> tuple[str, _Level, str]:
    """The kind of link that a round waits for, how long, and what that rests on."""
    messages = {}
    if one.inside_bytes:
        inside = math.ceil(one.inside_bytes)
        messages["intra"] = problem.collective("send", inside, 2, 1, by_data=True)
    if one.between_bytes:
        messages["inter"] = problem.collective(
            "send", math.ceil(one.between_bytes), 2, 2, by_data=True, beside=one.senders
        )
    link = max(messages, key=lambda name: messages[name].alone_ns)
    cost, times = messages[link], one.repeats
    hops = 2 if problem.cluster.backend == "gloo" else 1
    own = one.inside_bytes if link == "intra" else one.between_bytes * one.senders / local
    flow_ns = cost.alone_ns - cost.latency_ns
    return link, _Level(times * hops * cost.latency_ns, times * flow_ns, times * own), cost.source


def added_bytes(algorithm: str, size_bytes: int, ranks: int, nodes: int = 1) -> int:
    """Memory that a rank moves to add up what comes.

    Whole buffers in every doubling or level of a tree that is not cut, else each element once.
    """
    elements = size_bytes // 4
    if pieces_of(algorithm, size_bytes, node_sizes(alike(ranks, nodes))) > 1:
        return ADDED_BYTES * elements
    if algorithm in ("tree", "recursive_doubling"):
        return ADDED_BYTES * elements * math.ceil(math.log2(ranks))
    return ADDED_BYTES * elements * (ranks - 1) // ranks
