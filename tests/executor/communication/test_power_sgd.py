"""PowerSGD on three real ranks: exact where the rank suffices, and nothing lost where not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

Found = list[dict[str, Any]]
"""Of each rank, what each case found."""


def test_a_mean_of_no_more_than_the_rank_is_exact(hooked: Found) -> None:
    """Three ranks with matrices of rank 1 each; the bias travels whole."""
    for rank in hooked:
        for name in ("exact", "bias"):
            mean, exact = rank["low_rank"][name]
            torch.testing.assert_close(mean, exact, rtol=0, atol=1e-12)


def test_what_came_is_what_went_less_the_errors(hooked: Found) -> None:
    found = [rank["low_rank"] for rank in hooked]
    error = torch.stack([one["error"]["error.5"] for one in found]).mean(0)
    # The errors are those after one round more.
    came, went = found[0]["came"] + found[0]["again"][0], torch.zeros_like(error)
    for rank, one in enumerate(found):
        generator = torch.Generator().manual_seed(1000 * rank + 11)
        last = torch.randn(360, generator=generator, dtype=torch.float64).view(12, 30)
        went += (one["went"] + last) / len(found)
    torch.testing.assert_close(came, went - error, rtol=0, atol=1e-12)


def test_saved_errors_and_factors_go_on_to_the_last_bit(hooked: Found) -> None:
    for rank in hooked:
        made, loaded = rank["low_rank"]["again"]
        assert torch.equal(made, loaded)
        assert torch.equal(made, hooked[0]["low_rank"]["again"][0])


def test_it_begins_after_the_whole_backwards_and_sends_thin_matrices(hooked: Found) -> None:
    whole, low = hooked[0]["hooked_gradients"]["plain"], hooked[0]["hooked_low_rank"]
    for step in (0, 1):
        torch.testing.assert_close(low["gradients"][step], whole[step], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(low["gradients"][2], whole[2], rtol=0.1)
    for rank in hooked:
        assert torch.equal(rank["hooked_low_rank"]["gradients"][3], low["gradients"][3])
    # Biases of 30 and 10; two columns for each side of 30 x 20 and 10 x 30, in fp32.
    assert low["moved"] == [(2, 4 * (30 + 10 + 2 * (30 + 20) + 2 * (10 + 30)))]


def test_errors_of_coded_factors_stay_small_and_lose_only_what_is_rounded(hooked: Found) -> None:
    found = [rank["coded_low_rank"] for rank in hooked]
    came, went, error = (
        torch.stack([one[name] for one in found]).mean(0) for name in ("came", "went", "error")
    )
    for one in found:
        assert torch.equal(one["came"], found[0]["came"])
        # As the article keeps them, this rank's would have all that it ever differed by.
        assert one["error"].norm() < 0.5 * (one["went"] - one["came"]).norm()
    # A hundred roundings to 11 bits, half of them up.
    assert (came - (went - error)).norm() < 100**0.5 * 2**-11 * error.norm()
    assert not torch.equal(came, went - error)
