"""From one flat gradient to what averaging it over replicas takes: kernels, collectives, bytes.

The library's own all-reduce runs beside the computation: NCCL's on a stream, gloo's on threads of
its own, which between hosts mostly wait for the wire; inside one they need the cores that compute.
What the executor makes of several calls (`executor.communication`) runs on a thread, too, but its
kernels take turns with those of the backward, so on accelerators all of it is waited for.

A codec's mean has two phases (Tang et al. 2021, 1-bit Adam, arXiv 2102.02888): every rank encodes
each other's part and all exchange them; each decodes what it got, averages its part, encodes it
again, and all gather the parts. With the algorithm `hierarchical` gradients are added up whole
inside nodes first, and codes travel between nodes alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.coded_rounds import exchanges_by
from claw_plan.planner.low_rank import Shapes, factors_in, is_low_rank, kernels_ns
from claw_plan.planner.lower_data import memory_work
from claw_plan.planner.message_rounds import added_bytes, all_reduce_by
from claw_plan.planner.placement import group_nodes
from claw_plan.planner.problem import STORED_BYTES, Problem
from claw_plan.planner.supported import OF_MOMENTUM
from claw_plan.planner.zero_one import APART_BYTES, MET_BYTES, SENT_AS, is_zero_one
from claw_plan.profiles.codecs import CodecDescriptor, describe_codec
from claw_plan.profiles.coded_means import part_sizes
from claw_plan.profiles.cost import CollectiveCost
from claw_plan.profiles.work import OpWork

AXIS = "dp_replicate"

FEEDBACK_BYTES = 24
"""Bytes moved for each element around an encoding with error feedback: gradient and residual are
read and their sum written, then sum and decoded codes are read and the new residual written."""

CORRECTED_BYTES = 40
"""The same where momentum is kept in the residual's place: velocity decays (8) and takes the
gradient (12), what was not sent takes the velocity (12), and the gradient is looked at twice for
what is not finite (8). Counted from kernels.momentum_correction."""

MEAN_BYTES = 12
"""The same for adding a decoded part to those before: two read, one written, in fp32."""

CAST_BYTES = 8
"""The same for a copy in fp32: a mean divided by the ranks, or the result put in its place."""

CHECK_BYTES = 4
"""Bytes read for each element of a mean gradient, to see whether all are finite; as many of what
is sent as fp16, whose scale follows the largest magnitude."""

FLAT_BYTES = 8
"""Bytes moved for each element when gradients are made one vector at a step's end."""

MOMENTUM_BYTES, MOVE_BYTES = 24, 4
"""The same where AdamW's momentum travels: it is mixed with the gradient (12) and scaled by the
step's rate (12) before it is encoded; after, what the optimizer moves beyond AdamW's own step (32
less 28): the rate taken out again into the momentum (12), weights decayed and moved (20). Counted
from executor.optimizers.one_bit_adam."""

WITH_MOMENTUM = ("adamw", "lamb")
"""Optimizers whose momentum may travel."""

LAYER_BYTES = 100
"""Moved for each element where LAMB's momentum travels, beyond 1-bit Adam's step and LAMB's own
(116): the momentum is copied (8), the gradient (28) and newer second moments (24) are made of it
again, their roots (24) compared with the frozen ones (40), and each layer is scaled before and
after it travels (16), decays and moves (60), less what both count already (100). Counted from
executor.optimizers.one_bit_lamb."""

ADD = "communication.add"
"""How measurements may name what a rank does to add up the messages of an all-reduce."""

SCALED = "fp16"
"""The codec whose scale all ranks agree on at every step."""

known_codec = cache(describe_codec)


class Phase(NamedTuple):
    """Kernels, then a collective."""

    kernels_ns: int
    cost: CollectiveCost


@dataclass(frozen=True, slots=True)
class Averaging:
    """The phases in turn, and the kernels after the last; `is_waited_for` by the computation."""

    phases: tuple[Phase, ...]
    last_ns: int = 0
    is_waited_for: bool = False


NOTHING = Averaging(())


def averaging(
    problem: Problem, candidate: Candidate, elements: int, shapes: Shapes = ()
) -> Averaging:
    """Of so many fp32 elements over dp_replicate; `shapes` are those of a bucket's tensors."""
    ranks = candidate.dp_replicate
    if ranks == 1 or not elements:
        return NOTHING
    nodes = group_nodes(candidate, AXIS, problem.devices_per_node)
    if is_low_rank(candidate):
        return _factored(problem, candidate, elements, shapes)
    if is_zero_one(candidate):
        return _of_moves(problem, candidate, elements)
    if candidate.codec != "none":
        return _encoded(problem, candidate, elements, nodes)
    return _all_reduced(problem, candidate, elements, nodes)


def _all_reduced(problem: Problem, candidate: Candidate, elements: int, nodes: int) -> Averaging:
    """Of numbers as they are."""
    ranks, size = candidate.dp_replicate, STORED_BYTES * elements
    if candidate.collective != "auto":
        by_messages = all_reduce_by(problem, candidate.collective, size, ranks, nodes)
        moved_bytes = added_bytes(candidate.collective, size, ranks, nodes) + CAST_BYTES * elements
        adding_ns = problem.cost.op(memory_work(ADD, moved_bytes, "backward")).ns
        is_waited_for = not _waits_for_the_wire(problem, nodes)
        return Averaging((Phase(adding_ns, by_messages),), is_waited_for=is_waited_for)
    cost = problem.collective("all_reduce", size, ranks, nodes, by_data=True)
    is_waited_for = problem.cluster.backend == "gloo" and nodes == 1
    return Averaging((Phase(0, cost),), is_waited_for=is_waited_for)


def _factored(problem: Problem, candidate: Candidate, elements: int, shapes: Shapes) -> Averaging:
    """PowerSGD: what travels whole and all P together, then all Q."""
    nodes = group_nodes(candidate, AXIS, problem.devices_per_node)
    factors = factors_in(candidate, shapes or ((elements,),))
    before, between, after = kernels_ns(problem, factors, elements)
    phases = []
    for ns, sent in ((before, factors.whole + factors.left), (between, factors.right)):
        if sent:
            ((adding_ns, cost),) = _all_reduced(problem, candidate, sent, nodes).phases
            phases.append(Phase(ns + adding_ns, cost))
    is_waited_for = not _waits_for_the_wire(problem, nodes)
    return Averaging(tuple(phases), last_ns=after, is_waited_for=is_waited_for)


def _of_moves(problem: Problem, candidate: Candidate, elements: int) -> Averaging:
    """What replicas of 0/1 Adam moved, where they meet; else what each does alone."""
    if problem.is_apart:
        alone_ns = problem.memory_op_ns(APART_BYTES * elements)
        return Averaging((), last_ns=alone_ns, is_waited_for=True)
    mean = averaging(problem, replace(candidate, codec=SENT_AS), elements)
    return replace(mean, last_ns=mean.last_ns + problem.memory_op_ns(MET_BYTES * elements))


def _encoded(problem: Problem, candidate: Candidate, elements: int, nodes: int) -> Averaging:
    codec, optimizer = known_codec(candidate.codec), problem.training.optimizer
    of_momentum = sends_momentum(candidate, optimizer)
    found = exchanges_by(
        problem, candidate.collective, codec, elements, candidate.dp_replicate, nodes
    )
    encode, mean, decode = (
        problem.cost.op(work).ns
        for work in codec_works(codec, found.elements, found.ranks, of_momentum)
    )
    first_ns, last_ns = 0, 0
    if optimizer == "lamb" and of_momentum:
        last_ns = problem.memory_op_ns(LAYER_BYTES * elements)
    if not of_momentum:
        first_ns = _largest_ns(problem, codec, elements)
        last_ns = problem.memory_op_ns(CHECK_BYTES * elements)
    phases = [Phase(encode, found.exchange), Phase(mean, found.gather)]
    if found.inside is None:
        last_ns += decode
    else:
        copy_ns, add_ns, put_ns = _node_kernels(problem, elements, found.elements, of_momentum)
        phases[0] = Phase(add_ns + encode, found.exchange)
        phases = [Phase(copy_ns, found.inside), *phases, Phase(decode, found.inside)]
        last_ns += put_ns
    phases[0] = Phase(first_ns + phases[0].kernels_ns, phases[0].cost)
    return Averaging(
        phases=tuple(phases),
        last_ns=last_ns,
        is_waited_for=of_momentum or not _waits_for_the_wire(problem, nodes),
    )


def _node_kernels(
    problem: Problem, elements: int, own: int, of_momentum: bool
) -> tuple[int, int, int]:
    """Where a rank encodes its own elements of its node's sum: before, to sum it up, and after.

    The kernels of an optimizer that sends momentum work on the others' elements as well.
    """
    rest, (before, after) = elements - own, (0, 0)
    if of_momentum:
        before, after = MOMENTUM_BYTES, MOVE_BYTES
    copied, added = CAST_BYTES * elements + before * rest, MEAN_BYTES * rest + CAST_BYTES * own
    copy_ns, add_ns, put_ns = (
        problem.cost.op(memory_work(ADD, size_bytes, "backward")).ns
        for size_bytes in (copied, added, (CAST_BYTES + after) * rest)
    )
    return copy_ns, add_ns, put_ns


def codec_works(
    codec: CodecDescriptor, elements: int, ranks: int, of_momentum: bool
) -> tuple[OpWork, OpWork, OpWork]:
    """A rank's kernels around and between the two phases, by the memory that they move."""
    before, after = (MOMENTUM_BYTES, MOVE_BYTES) if of_momentum else (0, 0)
    encode_bytes = encoding_bytes(codec)
    own = max(part_sizes(elements, ranks))
    server_bytes = ranks * (codec.decode_bytes + MEAN_BYTES) + CAST_BYTES + encode_bytes
    moved = {
        "encode": (before + _worker_bytes(codec)) * elements,
        "mean": server_bytes * own,
        "decode": (codec.decode_bytes + CAST_BYTES + after) * elements,
    }
    encode, mean, decode = (
        memory_work(f"codec.{codec.name}.{what}", round(size_bytes), "backward")
        for what, size_bytes in moved.items()
    )
    return encode, mean, decode


def _largest_ns(problem: Problem, codec: CodecDescriptor, elements: int) -> int:
    return problem.memory_op_ns(CHECK_BYTES * elements) if codec.name == SCALED else 0


def at_end(problem: Problem, candidate: Candidate, elements: int) -> Averaging:
    """The same of gradients that nothing laid out as one vector, once a step is complete."""
    mean = averaging(problem, candidate, elements)
    first, *others = mean.phases
    flat_ns = problem.memory_op_ns(FLAT_BYTES * elements)
    return replace(mean, phases=(Phase(flat_ns + first.kernels_ns, first.cost), *others))


def agrees_on_overflow(candidate: Candidate, optimizer: str | None) -> bool:
    """Whether all ranks tell each other, once a step, if what they decoded is finite.

    Where ranks hold parts of the gradients, and where the scale of fp16 moves.
    """
    if candidate.codec == "none" or sends_momentum(candidate, optimizer):
        return False
    in_parts = max(candidate.tp, candidate.pp, candidate.shard_ranks) > 1
    return in_parts or known_codec(candidate.codec).name == SCALED


def sends_momentum(candidate: Candidate, optimizer: str | None) -> bool:
    """Whether the optimizer exchanges its momentum after the backward, and no gradients."""
    return optimizer in WITH_MOMENTUM and candidate.codec.partition(":")[0] in OF_MOMENTUM


def _waits_for_the_wire(problem: Problem, nodes: int) -> bool:
    """Whether a thread that communicates leaves the cores to the backward."""
    return problem.cluster.backend == "gloo" and nodes > 1


def encoding_bytes(codec: CodecDescriptor) -> float:
    """Bytes moved for each element that is encoded, with what finds out what was left out."""
    if not codec.needs_error_feedback:
        return codec.encode_bytes
    return codec.encode_bytes + codec.decode_bytes + FEEDBACK_BYTES


def _worker_bytes(codec: CodecDescriptor) -> float:
    """The same where gradients come from the backward: momentum may be kept before the codec."""
    return codec.encode_bytes + CORRECTED_BYTES if codec.momentum else encoding_bytes(codec)


def scattering(
    problem: Problem, codec_text: str, elements: int, ranks: int, nodes: int
) -> Averaging:
    """The first phase alone, over dp_shard: each rank gets its part of so many elements."""
    codec = known_codec(codec_text)
    own = -(-elements // ranks)
    moved_bytes = encoding_bytes(codec) * elements
    encode = memory_work(f"codec.{codec.name}.encode", round(moved_bytes), "backward")
    mean_bytes = (ranks * (codec.decode_bytes + MEAN_BYTES) + CAST_BYTES) * own
    mean = memory_work(f"codec.{codec.name}.mean", round(mean_bytes), "backward")
    size, encode_ns = ranks * codec.wire_bytes(own), problem.cost.op(encode).ns
    exchange = problem.collective("all_to_all", size, ranks, nodes, by_data=True)
    return Averaging(
        phases=(Phase(_largest_ns(problem, codec, elements) + encode_ns, exchange),),
        last_ns=problem.cost.op(mean).ns + problem.memory_op_ns(CHECK_BYTES * own),
        is_waited_for=True,
    )


def scatters_codes(candidate: Candidate) -> bool:
    """Whether shards reduce through the codec: replicas do where there are some."""
    shards = candidate.shard_ranks > 1
    return candidate.codec != "none" and candidate.dp_replicate == 1 and shards


def residual_bytes(problem: Problem, candidate: Candidate, elements: int) -> int:
    """What error feedback keeps of so many elements: a worker's residual and a server's."""
    if candidate.codec == "none" or candidate.dp * candidate.cp == 1:
        return 0
    codec, ranks = known_codec(candidate.codec), candidate.dp_replicate
    # On a CPU the last residual and the next take turns (kernels.error_feedback).
    kept = 2 if problem.device.kind == "cpu" else 1
    if scatters_codes(candidate):
        return kept * codec.state_bytes(elements)
    if candidate.collective == "hierarchical":
        nodes = group_nodes(candidate, AXIS, problem.devices_per_node)
        # What a rank encodes is a part of its node's sum.
        elements, ranks = max(part_sizes(elements, ranks // nodes)), nodes
    velocity = STORED_BYTES * elements if codec.momentum else 0
    errors = codec.state_bytes(elements) + codec.state_bytes(-(-elements // ranks))
    return velocity + kept * errors
