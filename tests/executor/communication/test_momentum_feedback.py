"""Momentum before a sparse codec, on three real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from claw_plan.executor.communication.momentum_feedback import with_momentum
from claw_plan.kernels.codec import CodecError, codec_of

Found = list[dict[str, Any]]
"""Of each rank, what each case found."""


def test_a_codec_that_sends_all_elements_takes_no_momentum() -> None:
    with pytest.raises(CodecError, match="needs one that leaves elements out"):
        with_momentum(codec_of("int8"), 0.9)


@pytest.mark.slow
def test_what_is_always_sent_never_gathers_momentum(hooked: Found) -> None:
    """The mask forgets it, so all rounds bring the mean itself."""
    came = hooked[0]["with_momentum"]["top_k:1.0"]["came"]
    gradients = []
    for rank in range(3):
        generator = torch.Generator().manual_seed(1000 * rank)
        gradients.append(torch.randn(1003, generator=generator, dtype=torch.float64).float())
    mean = torch.stack(gradients).mean(0).expand_as(came)
    torch.testing.assert_close(came, mean, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_all_ranks_get_equal_bits_and_saved_momentum_goes_on(hooked: Found) -> None:
    for rank in hooked:
        own, first = rank["with_momentum"]["top_k:0.1"], hooked[0]["with_momentum"]["top_k:0.1"]
        assert torch.equal(own["came"], first["came"])
        assert own["came"].count_nonzero(dim=1).max() <= 0.1 * 1003 + 3
        made, loaded = own["again"]
        assert torch.equal(made, loaded)
