"""A codec's mean by rounds of messages, as `executor.communication` runs it, to what it costs.

`profiles.coded_means` says who sends what to whom. Every rank sends each other its part, straight:
in turn k to the k-th rank after its own, so of a node as many send to others at once as lie within
k of its end. Then the parts are gathered by the algorithm. Under `hierarchical` numbers are summed
up inside nodes first, ranks of equal place exchange codes between nodes, all those of a node at
once, and numbers are spread inside nodes last.
"""

from __future__ import annotations

from typing import NamedTuple

from claw_plan.planner.message_rounds import Messages, flow_of, messages_of
from claw_plan.planner.problem import STORED_BYTES, Problem
from claw_plan.profiles.codecs import CodecDescriptor
from claw_plan.profiles.coded_means import part_sizes, straight_turns
from claw_plan.profiles.collective_algorithms import gathering_rounds, node_rounds
from claw_plan.profiles.collective_schedules import alike, node_sizes
from claw_plan.profiles.cost import CollectiveCost
from claw_plan.profiles.work import CollectiveWork


class CodedExchanges(NamedTuple):
    """What `ranks` that encode so many `elements` each exchange, and what goes on inside nodes.

    `inside` comes before and after them, None where nothing does. Where messages are our own the
    work of the whole mean stands with `exchange`, for `planner.traffic`.
    """

    ranks: int
    elements: int
    exchange: CollectiveCost
    gather: CollectiveCost
    inside: CollectiveCost | None = None


def exchanges_by(
    problem: Problem, algorithm: str, codec: CodecDescriptor, elements: int, ranks: int, nodes: int
) -> CodedExchanges:
    """Of gradients of so many elements over so many ranks on so many nodes.

    `algorithm` is 'auto' for the library's own collectives.
    """
    if algorithm == "auto":
        return _by_the_library(problem, codec, elements, ranks, nodes)
    work = CollectiveWork(
        op="all_reduce", bytes=STORED_BYTES * elements, group_size=ranks, nodes=nodes,
        backend=problem.cluster.backend, algorithm=algorithm,
    )  # fmt: skip
    if algorithm == "hierarchical":
        return _between_nodes(problem, codec, elements, work)
    sizes = node_sizes(alike(ranks, nodes))
    local = max(sizes)
    wire = max(codec.wire_bytes(part) for part in part_sizes(elements, ranks))
    straight = [
        Messages(repeats, wire * (senders < local), wire * (senders > 0), senders)
        for senders, repeats in straight_turns(sizes)
    ]
    gathering = messages_of(algorithm, gathering_rounds(algorithm, sizes), ranks * wire, local)
    return CodedExchanges(
        ranks=ranks,
        elements=elements,
        exchange=flow_of(problem, straight, local, algorithm, (work,)),
        gather=flow_of(problem, gathering, local, algorithm, ()),
    )


def _by_the_library(
    problem: Problem, codec: CodecDescriptor, elements: int, ranks: int, nodes: int
) -> CodedExchanges:
    wires = [codec.wire_bytes(part) for part in part_sizes(elements, ranks)]
    gathered = ranks * max(wires)
    return CodedExchanges(
        ranks=ranks,
        elements=elements,
        exchange=problem.collective("all_to_all", sum(wires), ranks, nodes, by_data=True),
        gather=problem.collective("all_gather", gathered, ranks, nodes, by_data=True),
    )


def _between_nodes(
    problem: Problem, codec: CodecDescriptor, elements: int, work: CollectiveWork
) -> CodedExchanges:
    nodes, layout = work.nodes, alike(work.group_size, work.nodes)
    local = len(layout[0])
    own = max(part_sizes(elements, local))
    wire = max(codec.wire_bytes(part) for part in part_sizes(own, nodes))
    codes = [Messages(nodes - 1, 0, wire, local)]
    rounds = node_rounds(node_sizes(layout))
    inside = messages_of(work.algorithm, rounds, work.bytes, local)
    return CodedExchanges(
        ranks=nodes,
        elements=own,
        exchange=flow_of(problem, codes, local, work.algorithm, (work,)),
        gather=flow_of(problem, codes, local, work.algorithm, ()),
        inside=flow_of(problem, inside, local, work.algorithm, ()) if inside else None,
    )
