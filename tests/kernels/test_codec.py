"""What holds of every codec: the contract of `Codec`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from claw_plan.kernels.codec import CODECS, codec_of
from claw_plan.profiles.codecs import CODEC_NAMES, LOW_RANK, ZERO_ONE, CodecError, describe_codec

TEXTS = (
    *("none", "none:fp64", "fp16", "fp16:12", "one_bit", "one_bit:l2"),
    *("top_k:0.001", "top_k:0.3", "threshold:0.5", "threshold:0"),
    *("fp8", "fp8:e5m2,32", "int8", "int8:32,stochastic", "int4", "int4:16,stochastic"),
)
EXTREMES = (0.0, -0.0, 3.4e38, -3.4e38, 1e-45, -1e-45, 1e-38, 1.0, -1.0)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
VECTORS = st.lists(FINITE | st.sampled_from(EXTREMES), max_size=70)


def squares(x: Tensor) -> float:
    return float(x.double().square().sum())


def test_the_registry_knows_the_codecs_that_texts_may_name() -> None:
    assert {*CODECS, LOW_RANK, ZERO_ONE} == set(CODEC_NAMES)
    with pytest.raises(CodecError, match="codec 'low_rank:2' makes no codes"):
        codec_of("low_rank:2")
    with pytest.raises(CodecError, match="what they send then is one_bit"):
        codec_of("zero_one")


def test_momentum_is_kept_before_the_codec() -> None:
    assert codec_of("top_k:0.01,0.9") == codec_of("top_k:0.01")


def test_an_unknown_name_is_told() -> None:
    with pytest.raises(CodecError, match="no codec 'onebit'; did you mean 'one_bit'"):
        codec_of("onebit")


@pytest.mark.parametrize("text", TEXTS)
def test_codecs_are_values(text: str) -> None:
    assert codec_of(text) == codec_of(text)
    assert len({codec_of(text), codec_of(text)}) == 1


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("numel", [0, 1, 2, 7, 8, 9, 63, 64, 65, 127, 256, 1000, 4099])
def test_codes_are_as_long_as_both_rooms_say(text: str, numel: int) -> None:
    codec = codec_of(text)
    codes = codec.encode(torch.randn(numel))
    assert codes.dtype == torch.uint8 and codes.dim() == 1
    assert codec.wire_bytes(numel) == describe_codec(text).wire_bytes(numel)
    assert codec.needs_error_feedback == describe_codec(text).needs_error_feedback
    if codec.has_fixed_size:
        assert codes.numel() == codec.wire_bytes(numel)
    assert codes.numel() <= codec.wire_bytes(numel) and codes.numel() % 4 == 0
    assert codec.decode(codes, numel).shape == (numel,)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_floating_type_is_taken_as_its_fp32(text: str, dtype: torch.dtype) -> None:
    codec = codec_of(text)
    x = torch.randn(77).to(dtype)
    assert torch.equal(codec.encode(x), codec.encode(x.float())) or text == "none:fp64"
    assert codec.decode(codec.encode(x), 77, dtype).dtype == dtype


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_memory_that_is_there_is_written_whole(text: str, dtype: torch.dtype) -> None:
    codec = codec_of(text)
    codes = codec.encode(torch.randn(77))
    room = torch.full((100,), torch.nan, dtype=dtype)
    assert codec.decode_into(codes, room[3:80]).data_ptr() == room[3:].data_ptr()
    assert torch.equal(room[3:80], codec.decode(codes, 77, dtype))
    assert room[:3].isnan().all() and room[80:].isnan().all()


@pytest.mark.parametrize("text", TEXTS)
def test_strides_and_gradients_do_not_matter(text: str) -> None:
    codec = codec_of(text)
    x = torch.randn(12, 10, requires_grad=True)
    codes = codec.encode(x.t())
    assert torch.equal(codes, codec.encode(x.t().contiguous()))
    assert not codec.decode(codes, 120).requires_grad


@pytest.mark.parametrize("text", TEXTS)
def test_the_input_is_left_alone_and_not_shared(text: str) -> None:
    x = torch.randn(65)
    before = x.clone()
    codes = codec_of(text).encode(x)
    kept = codes.clone()
    assert torch.equal(x, before)
    x.zero_()
    assert torch.equal(codes, kept)


@pytest.mark.parametrize("text", TEXTS)
def test_codes_of_chunks_may_lie_one_after_another(text: str) -> None:
    codec = codec_of(text)
    chunks = [torch.randn(size) for size in (5, 33, 1, 64)]
    parts = [codec.encode(chunk) for chunk in chunks]
    joined = torch.cat(parts)
    for chunk, part, codes in zip(
        chunks, joined.split([part.numel() for part in parts]), parts, strict=True
    ):
        numel = chunk.numel()
        assert torch.equal(codec.decode(part, numel), codec.decode(codes, numel))


@pytest.mark.parametrize("text", TEXTS)
@settings(max_examples=60, deadline=None)
@given(values=VECTORS)
def test_errors_stay_within_the_contraction(text: str, values: list[float]) -> None:
    codec = codec_of(text)
    x = torch.tensor(values, dtype=torch.float32)
    error = squares(x - codec.decode(codec.encode(x), x.numel()))
    if codec.contraction is not None and not is_tiny(x):
        # The difference itself is rounded to fp32.
        assert error <= codec.contraction * squares(x) * (1 + 1e-6)
    elif text not in ("one_bit:l2", "fp16", "fp16:12"):
        assert error <= squares(x) * (1 + 1e-6)


def is_tiny(x: Tensor) -> bool:
    """Whether fp32's own smallest numbers are in play."""
    return bool(x.abs().max() < 2.0**-100) if x.numel() else True


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_seen_by_who_decodes(text: str, bad: float) -> None:
    x = torch.randn(300)
    x[123] = bad
    codec = codec_of(text)
    decoded = codec.decode(codec.encode(x), 300)
    assert not decoded[123].isfinite()


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_not_sent_is_the_input_less_the_decoded(text: str) -> None:
    codec = codec_of(text)
    x = torch.randn(301)
    codes = codec.encode(x)
    rest = codec.subtract_sent(x.clone(), codes)
    np.testing.assert_array_equal(rest.numpy(), x.numpy() - codec.decode(codes, 301).numpy())
