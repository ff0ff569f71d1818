"""The momentum through thin matrices, on four real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

Found = list[dict[str, Any]]


def test_it_begins_as_adamw_and_learns_with_equal_bits_on_all_ranks(found: Found) -> None:
    adamw = found[0]["warm_is_adamw"]["adamw"]
    for rank in found:
        own = rank["power_sgd"]
        assert torch.equal(own["seen"][9], adamw[9])
        assert not torch.equal(own["seen"][10], adamw[10])
        assert torch.equal(own["seen"][-1], found[0]["power_sgd"]["seen"][-1])
        assert own["losses"][-1] < 0.05 * own["losses"][0]


def test_a_resumed_training_goes_on_with_the_same_bits(found: Found) -> None:
    for rank in found:
        uninterrupted, resumed = rank["resumed"]["power_sgd"]
        assert torch.equal(uninterrupted, resumed)
