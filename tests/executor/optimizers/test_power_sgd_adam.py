"""The momentum through thin matrices, on four real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

Found = list[dict[str, Any]]


@pytest.mark.parametrize("factors", ["none", "int8"])
def test_it_begins_as_adamw_and_learns_with_equal_bits_on_all_ranks(
    found: Found, factors: str
) -> None:
    adamw = found[0]["warm_is_adamw"]["adamw"]
    for rank in found:
        own = rank["power_sgd"][factors]
        assert torch.equal(own["seen"][9], adamw[9])
        assert not torch.equal(own["seen"][10], adamw[10])
        assert torch.equal(own["seen"][-1], found[0]["power_sgd"][factors]["seen"][-1])
        assert own["losses"][-1] < 0.05 * own["losses"][0]


def test_the_common_momentum_follows_the_mean_as_written_out(found: Found) -> None:
    """Eight steps of thin matrices after ten whole ones."""
    ours, peer = found[0]["power_sgd"]["none"]["seen"], found[0]["power_sgd"]["peer"]
    for step in range(18):
        torch.testing.assert_close(ours[step], peer[step], rtol=0, atol=2e-5)
    moved = (ours[17] - ours[9]).abs().max()
    assert moved > 0.02


def test_factors_of_codes_change_little(found: Found) -> None:
    whole, coded = (found[0]["power_sgd"][factors]["seen"][11] for factors in ("none", "int8"))
    start = found[0]["power_sgd"]["none"]["seen"][9]
    assert (whole - coded).norm() < 0.05 * (whole - start).norm()


def test_a_resumed_training_goes_on_with_the_same_bits(found: Found) -> None:
    for rank in found:
        uninterrupted, resumed = rank["resumed"]["power_sgd"]
        assert torch.equal(uninterrupted, resumed)
