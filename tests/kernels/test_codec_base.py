"""What all codecs share: alignment, and codes that do not fit."""

from __future__ import annotations

import pytest
import torch

from claw_plan.kernels.codec import codec_of
from claw_plan.kernels.codec_base import aligned, typed
from claw_plan.profiles.codecs import CodecError


def test_sizes_are_rounded_up_to_four_bytes() -> None:
    assert [aligned(size) for size in (0, 1, 4, 5)] == [0, 4, 4, 8]


@pytest.mark.parametrize("offset", [0, 1, 4])
def test_bytes_are_read_as_numbers_wherever_they_lie(offset: int) -> None:
    numbers = torch.tensor([1.5, -2.0])
    raw = torch.zeros(16, dtype=torch.uint8)
    raw[offset : offset + 8] = numbers.view(torch.uint8)
    assert torch.equal(typed(raw[offset : offset + 8], torch.float32), numbers)


def test_codes_of_another_length_or_type_are_refused() -> None:
    codec = codec_of("one_bit")
    with pytest.raises(
        CodecError, match=r"9 elements have 8 bytes of codes, got 4 of torch\.uint8"
    ):
        codec.decode(torch.zeros(4, dtype=torch.uint8), 9)
    with pytest.raises(CodecError, match=r"got 8 of torch\.float32"):
        codec.decode(torch.zeros(8), 9)


def test_whole_numbers_are_not_encoded() -> None:
    with pytest.raises(CodecError, match=r"takes floating-point tensors, got torch\.int64"):
        codec_of("one_bit").encode(torch.arange(3))
