"""What tensors a rank makes while gradients become codes and codes gradients, at most at once.

Beside what error feedback keeps (`averaging.residual_bytes`). Counted from the executor's
`communication.compressed`: a vector of a bucket's gradients is there all the time.
"""

from __future__ import annotations

from collections.abc import Sequence

from claw_plan.planner.averaging import known_codec
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.problem import STORED_BYTES, Problem
from claw_plan.planner.shards import GroupSize
from claw_plan.planner.supported import sends_codes
from claw_plan.profiles.codecs import CodecDescriptor
from claw_plan.profiles.coded_means import part_sizes


def mean_bytes(problem: Problem, candidate: Candidate, elements: int) -> int:
    """Of a mean in two phases, beside the vector of so many elements."""
    codec, ranks = known_codec(candidate.codec), candidate.dp_replicate
    parts = part_sizes(elements, ranks)
    sent, own = sum(map(codec.wire_bytes, parts)), STORED_BYTES * max(parts)
    came = ranks * codec.wire_bytes(max(parts))
    return max(
        sent + _remade_bytes(problem, codec, elements),
        2 * sent + came,  # codes, and those that go and come in one piece each
        sent + came + 2 * own,  # each that came is decoded beside the sum
        own + came // ranks + came + STORED_BYTES * elements,  # all means, decoded
    )


def scattered_bytes(problem: Problem, candidate: Candidate, own_elements: int) -> int:
    """Of the first phase alone, where each rank of dp_shard gets so many elements."""
    codec, ranks = known_codec(candidate.codec), candidate.shard_ranks
    codes, own = ranks * codec.wire_bytes(own_elements), STORED_BYTES * own_elements
    made = _remade_bytes(problem, codec, ranks * own_elements)
    return max(codes + made, 3 * codes, 2 * codes + 2 * own)


def _remade_bytes(problem: Problem, codec: CodecDescriptor, elements: int) -> int:
    """The residual that is made beside the last one; CPUs keep two that take turns."""
    return 0 if problem.device.kind == "cpu" else codec.state_bytes(elements)


def largest_bucket(candidate: Candidate, groups: Sequence[GroupSize]) -> int:
    """Elements of a bucket at most: one is full as soon as it holds `bucket_bytes`."""
    total = sum(group.trainable_shard for group in groups)
    largest = max((group.largest for group in groups), default=0)
    return min(total, candidate.bucket_bytes // STORED_BYTES + largest)


def carries_codes(candidate: Candidate) -> bool:
    """Whether codes travel at all."""
    return sends_codes(candidate.codec) and candidate.dp * candidate.cp > 1
