"""Error feedback in one pass: the bits of adding, encoding, decoding and subtracting in turn."""

from __future__ import annotations

import pytest
import torch

from claw_plan.kernels.codec import codec_of
from claw_plan.kernels.error_feedback import ErrorFeedback

TEXTS = (
    *("one_bit", "one_bit:l2", "top_k:0.01", "top_k:0.3", "threshold:1.5", "threshold:0"),
    *("fp8", "fp8:e5m2,32", "int8", "int8:4096,stochastic", "int4", "int4:8,stochastic"),
)
SIZES = (1, 7, 8, 9, 255, 257, 4096, 70_001)


def plain(text: str, x: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codec = codec_of(text)
    total = before + x
    codes = codec.encode(total)
    rest = codec.subtract_sent(total.clone(), codes)
    return codes, rest if rest.isfinite().all() else before


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("numel", SIZES)
def test_codes_and_rest_are_those_of_the_plain_steps(text: str, numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    feedback, residual = ErrorFeedback(codec_of(text)), torch.zeros(numel)
    for step in range(4):
        x = torch.randn(numel, generator=generator) * 2.0**step
        if step == 2:
            x[numel // 2] = torch.inf
        assert feedback.codec.encode_fused(x, x, torch.empty(numel)) is not None
        codes, residual = plain(text, x, residual)
        assert torch.equal(feedback.encode(x), codes)
        assert feedback.residual is not None and torch.equal(feedback.residual, residual)


@pytest.mark.parametrize("text", TEXTS)
def test_chunks_and_numbers_of_all_sizes_make_no_difference(text: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9_001, generator=generator)
    x *= 2.0 ** torch.randint(-140, 120, (9_001,), generator=generator)
    feedback, sizes = ErrorFeedback(codec_of(text)), [4104, 0, 4897]
    for codes, chunk in zip(feedback.encode_chunks(x, sizes), x.split(sizes), strict=True):
        assert torch.equal(codes, codec_of(text).encode(chunk))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_numbers_take_the_plain_steps(dtype: torch.dtype) -> None:
    x, text = torch.randn(300).to(dtype), "int8"
    feedback = ErrorFeedback(codec_of(text))
    assert feedback.codec.encode_fused(x, x, x) is None
    assert torch.equal(feedback.encode(x), codec_of(text).encode(x))
