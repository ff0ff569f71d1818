"""0/1 Adam's steps: replicas meet in one of `longest_away`; a step takes the mean of both kinds.

Where they meet, each rank's moves since the last time become their mean through one bit, as
momentum does with 1-bit Adam; in the others nothing travels. Distances have grown to their longest
here, as they have for most of a training (`executor.optimizers.intervals`).
"""

from __future__ import annotations

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.problem import STORED_BYTES
from claw_plan.profiles.codecs import ZERO_ONE, describe_codec

SENT_AS = "one_bit"
"""The codec of what is sent where replicas meet."""

APART_BYTES = 52
"""Bytes moved for each element in a step apart beyond AdamW's own (28): momentum and gradient
mixed (12), what was common decays (8), what was moved decays and grows (32), weights made of both
(12) and put in place with the momentum (16). Counted from executor.optimizers.zero_one_adam."""

MET_BYTES = 72
"""The same where they meet, beyond 1-bit Adam's step (28 beyond AdamW's): weights made flat (8)
and room for moves (4), moves scaled before and after (16) and made the momentum again (20), and
the 52 above."""

AWAY_BYTES = 3 * STORED_BYTES
"""Kept for each element: weights when replicas last met, what was moved since, the frozen rate."""


def is_zero_one(candidate: Candidate) -> bool:
    """Whether replicas meet only now and then."""
    return candidate.codec.partition(":")[0] == ZERO_ONE


def longest_away(candidate: Candidate) -> int:
    """Steps from one meeting to the next."""
    return int(describe_codec(candidate.codec).parameters["longest_away"])


def mean_ns(candidate: Candidate, meeting_ns: int, apart_ns: int) -> int:
    """Of the steps from one meeting to the next."""
    steps = longest_away(candidate)
    return (meeting_ns + (steps - 1) * apart_ns) // steps
