"""1-bit LAMB on four real ranks: LAMB while warm, and then it goes on learning."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

Found = list[dict[str, Any]]


def test_a_warm_up_is_lamb(found: Found) -> None:
    seen = found[0]["lamb"]
    for ours, peer in zip(seen["seen"][:10], seen["peer"], strict=True):
        torch.testing.assert_close(ours, peer, rtol=0, atol=1e-5)


def test_it_goes_on_learning_with_equal_bits_on_all_ranks(found: Found) -> None:
    for rank in found:
        own = rank["lamb"]
        assert torch.equal(own["seen"][-1], found[0]["lamb"]["seen"][-1])
        assert own["losses"][-1] < 0.5 * own["losses"][10]


def test_a_resumed_training_goes_on_with_the_same_bits(found: Found) -> None:
    for rank in found:
        uninterrupted, resumed = rank["resumed"]["lamb"]
        assert torch.equal(uninterrupted, resumed)
