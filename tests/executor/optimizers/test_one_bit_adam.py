"""1-bit Adam on four real ranks: AdamW while warm, afterwards what an independent loop finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

Found = list[dict[str, Any]]

pytestmark = pytest.mark.slow

USED, WIDTH, ROWS = 40, 16, 60


def test_a_warm_up_is_adamw_to_the_last_bit(found: Found) -> None:
    for rank in found:
        seen = rank["warm_is_adamw"]
        for ours, adamw in zip(seen["hooked"], seen["adamw"], strict=True):
            assert torch.equal(ours, adamw)


def test_averaging_in_the_step_differs_by_the_order_of_sums_alone(found: Found) -> None:
    seen = found[0]["warm_is_adamw"]
    torch.testing.assert_close(seen["alone"][-1], seen["adamw"][-1], rtol=0, atol=1e-6)


def test_it_follows_the_article_step_by_step(found: Found) -> None:
    seen = found[0]["against_peer"]
    for ours, peer in zip(seen["ours"], seen["peer"], strict=True):
        torch.testing.assert_close(ours, peer, rtol=0, atol=1e-6)


def test_all_ranks_keep_equal_bits_and_learn(found: Found) -> None:
    first = found[0]["one_bit_and_its_limit"]
    for rank in found:
        own = rank["one_bit_and_its_limit"]
        assert torch.equal(own["seen"][-1], first["seen"][-1])
        assert torch.equal(own["plain"][-1], first["plain"][-1])
        assert own["losses"][-1] < 0.05 * own["losses"][0]


def test_what_never_had_a_gradient_only_decays(found: Found) -> None:
    seen = found[0]["one_bit_and_its_limit"]["seen"]
    unused = slice(USED * WIDTH, ROWS * WIDTH)
    # In the warm-up AdamW moves by 0 / (0 + eps), which is nothing, too.
    kept = seen[0][unused] * (1 - 2.0**-6 * 0.01) ** (len(seen) - 1)
    torch.testing.assert_close(seen[-1][unused], kept, rtol=1e-5, atol=0)


def test_a_resumed_training_goes_on_with_the_same_bits(found: Found) -> None:
    for rank in found:
        uninterrupted, resumed = rank["resumed"]["one_bit"]
        assert torch.equal(uninterrupted, resumed)


def test_a_compressed_step_sends_32_times_fewer_bytes(found: Found) -> None:
    """Of 131,072 elements fp32's ring sends 786,432 bytes, both phases together 24,600."""
    *warm, first, second = found[0]["counted"]["steps"]
    share = (4 - 1) / 4
    assert warm == [{"all_reduce": 131_072 * 4}] * 2
    assert first == second == {"all_to_all": 16_400, "all_gather": 16_400}
    ring, both = 2 * share * warm[0]["all_reduce"], share * (16_400 + 16_400)
    assert (ring, both) == (786_432, 24_600)
    assert ring / both >= 31.9
    assert ring * 100 / (15 * ring + 85 * both) >= 5.6
