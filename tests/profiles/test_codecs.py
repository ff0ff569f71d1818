"""The grammar of codecs, and sizes by hand."""

from __future__ import annotations

import pytest

from claw_plan.profiles.codecs import (
    CodecError,
    describe_codec,
    factored_elements,
    factors_of,
    kept_elements,
    matrix_shape,
    pays,
)


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
        ("low_rank", 5, 20),
        ("zero_one", 33, 12),
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


def test_sparse_codecs_may_keep_momentum() -> None:
    assert describe_codec("top_k:0.01,0.9").momentum == 0.9
    assert describe_codec("top_k:0.01,0.9").wire_bytes(1000) == 8 * 10
    assert describe_codec("top_k").momentum == describe_codec("int8").momentum == 0
    with pytest.raises(CodecError, match=r"momentum must be a number from 0 to 0\.999, got '1'"):
        describe_codec("threshold:0.1,1")


def test_shares_are_those_of_the_decimal_number() -> None:
    # 0.07 · 100 is 7.000000000000001 in floating point.
    assert kept_elements(0.07, 100) == 7
    assert kept_elements(0.001, 1) == 1


def test_shapes_and_sizes_of_factors() -> None:
    assert matrix_shape((64, 3, 7, 7)) == (64, 147)
    assert matrix_shape((5,)) == (5, 1) and matrix_shape(()) == (1, 1)
    # nm / (r (n + m)) = 1024·4096 / (4·5120)
    assert 1024 * 4096 / factored_elements((1024, 4096), 4) == 204.8
    assert pays((1024, 4096), 4)
    assert not pays((5, 1), 1) and not pays((8, 8), 4)
    assert factored_elements((2, 100), 4) == 2 * 102


def test_a_bucket_sends_thin_factors_and_all_else_whole() -> None:
    """Of 6 x 10 and 30 x 4 at rank 2; a vector and 4 x 4 whole."""
    factors = factors_of([(6, 10), (7,), (30, 2, 2), (4, 4)], 2)
    assert (factors.whole, factors.left, factors.right) == (7 + 16, 12 + 60, 20 + 8)
    assert factors.factored == 60 + 120
    assert factors.state_bytes() == 4 * (60 + 120 + 20 + 8)
    assert factors_of([(3, 3)], 1).matrices == ((3, 3),) and factors_of([(3,)], 1).whole == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("topk", "there is no codec 'topk'; did you mean 'top_k'"),
        (
            "",
            "there is no codec ''; known are fp16, fp8, int4, int8, low_rank, none, one_bit, "
            "threshold, top_k, zero_one",
        ),
        ("top_k:2", "density must be a number from 1e-09 to 1, got '2'"),
        ("top_k:nan", "density must be a number from 1e-09 to 1, got 'nan'"),
        ("threshold", "give its threshold, a number from 0 to 3e"),
        ("int8:100", "block must be a power of two from 8 to 4096, got '100'"),
        ("int8:8.5", "block must be a power of two"),
        ("one_bit:l3", "scale must be l1 or l2, got 'l3'"),
        ("fp16:200", "exponent must be a whole number from -126 to 126"),
        ("low_rank:0", "rank must be a whole number from 1 to 1024, got '0'"),
        ("zero_one:3", "longest_away must be a power of two from 1 to 1024, got '3'"),
        ("none:fp32,1", "2 parameters; write none:format"),
    ],
)
def test_what_is_wrong_is_told(text: str, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        describe_codec(text)
