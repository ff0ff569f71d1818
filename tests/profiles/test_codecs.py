"""The grammar of codecs, and sizes by hand."""

from __future__ import annotations

import pytest

from claw_plan.profiles.codecs import CodecError, describe_codec, kept_elements


@pytest.mark.parametrize(
    ("text", "numel", "expected"),
    [
        ("none", 5, 20),
        ("none:fp64", 5, 40),
        ("fp16", 5, 12),
        ("one_bit", 1, 8),
        ("one_bit", 33, 12),
        ("top_k:0.001", 1_000_000, 8_000),
        ("top_k:0.07", 100, 56),
        ("threshold:0.5", 100, 800),
        ("fp8", 256, 258),
        ("fp8:e5m2,32", 33, 36),
        ("int8", 512, 520),
        ("int4:64", 65, 44),
        ("int4", 0, 0),
    ],
)
def test_bytes_by_hand(text: str, numel: int, expected: int) -> None:
    bytes_by_hand = -(-expected // 4) * 4
    assert describe_codec(text).wire_bytes(numel) == bytes_by_hand


def test_state_is_a_residual_where_there_is_feedback() -> None:
    assert describe_codec("one_bit").state_bytes(10) == 40
    assert describe_codec("fp16").state_bytes(10) == 0


def test_parameters_have_the_names_of_the_codecs_fields() -> None:
    assert describe_codec("fp8:e5m2").parameters == {"format": "e5m2", "block": 128}
    assert describe_codec("int8:64,stochastic").parameters == {
        "block": 64,
        "rounding": "stochastic",
    }


def test_shares_are_those_of_the_decimal_number() -> None:
    # 0.07 · 100 is 7.000000000000001 in floating point.
    assert kept_elements(0.07, 100) == 7
    assert kept_elements(0.001, 1) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("topk", "codec 'topk': did you mean 'top_k'"),
        ("", "codec '': known are fp16, fp8, int4, int8, none, one_bit, threshold, top_k"),
        ("top_k:2", "density must be a number from 1e-09 to 1, got '2'"),
        ("top_k:nan", "density must be a number from 1e-09 to 1, got 'nan'"),
        ("threshold", "give its threshold, a number from 0 to 3e"),
        ("int8:100", "block must be a power of two from 8 to 4096, got '100'"),
        ("int8:8.5", "block must be a power of two"),
        ("one_bit:l3", "scale must be l1 or l2, got 'l3'"),
        ("fp16:200", "exponent must be a whole number from -126 to 126"),
        ("none:fp32,1", "2 parameters; write none:format"),
    ],
)
def test_what_is_wrong_is_told(text: str, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        describe_codec(text)
