"""0/1 Adam on four real ranks, and 1-bit Adam as its limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

Found = list[dict[str, Any]]

pytestmark = pytest.mark.slow


def test_its_limit_is_1_bit_adam_to_the_last_bit(found: Found) -> None:
    """Variances renewed at every step, then a meeting at every step; the rate a power of two."""
    seen = found[0]["one_bit_and_its_limit"]
    for limit, one_bit in zip(seen["limit"], seen["seen"], strict=True):
        assert torch.equal(limit, one_bit)
    warm = found[0]["warm_is_adamw"]
    assert torch.equal(warm["zero_one"][-1], warm["adamw"][-1])


def test_replicas_are_equal_when_they_say_so(found: Found) -> None:
    """12 steps together; then meetings 1, 2, 3, 4 and 6, 8, 10, 12, then every fourth."""
    meetings = {*range(1, 13), 13, 14, 15, 16, 18, 20, 22, 24, *range(28, 61, 4)}
    for step in range(60):
        states = [rank["zero_one"]["seen"][step] for rank in found]
        are_equal = all(torch.equal(state, states[0]) for state in states)
        assert are_equal == (step + 1 in meetings), step + 1
        assert all(rank["zero_one"]["equal"][step] == are_equal for rank in found)


def test_it_learns(found: Found) -> None:
    losses = found[0]["zero_one"]["losses"]
    assert losses[-1] < 0.05 * losses[0]


def test_a_resumed_training_goes_on_with_the_same_bits(found: Found) -> None:
    for rank in found:
        uninterrupted, resumed = rank["resumed"]["zero_one"]
        assert torch.equal(uninterrupted, resumed)


def test_between_meetings_nothing_can_be_saved(found: Found) -> None:
    assert found[0]["refused"]["errors"][-1] == (
        "after step 3 replicas of 0/1 Adam differ until they meet; save where "
        "optimizer.replicas_are_equal"
    )
