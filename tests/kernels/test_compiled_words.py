"""Instructions on words against the same said in Python's whole numbers."""

from __future__ import annotations

import numba
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.kernels import compiled_words as words

WORD = 0xFFFFFFFF
SIGNED = st.integers(-(2**31), 2**31 - 1)


@numba.njit
def pair(start: np.uint32, place: int, first: np.int32, second: np.int32) -> tuple[int, ...]:
    word = words.hashed_pair(start, place, first, second)
    return word, words.upper_fraction(word), words.lower_fraction(word)


@numba.njit
def larger(largest: np.int32, bits: np.int32) -> np.int32:
    return words.larger_magnitude(largest, bits)


@numba.njit
def mask(array: np.ndarray, start: int, limit: np.int32) -> tuple[int, int]:
    found = words.at_least_mask(array, start, limit)
    return found, words.trailing_zeros(found)


def mixed(word: int) -> int:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        word = ((word ^ (word >> shift)) * factor) & WORD
    return word


@settings(deadline=None)
@given(st.integers(0, WORD), st.integers(0, 2**40), SIGNED, SIGNED)
def test_a_hash_mixes_both_words_and_the_place(
    start: int, place: int, first: int, second: int
) -> None:
    low = second & WORD
    turned = ((low << 15) | (low >> 17)) & WORD
    expected = mixed((first + turned + start + place * 0x9E3779B1) & WORD)
    found = pair(np.uint32(start), place, np.int32(first), np.int32(second))
    assert found == (
        expected,
        ((expected >> 16) + 0.5) / 65536,
        ((expected & 0xFFFF) + 0.5) / 65536,
    )


@settings(deadline=None)
@given(st.integers(0, 2**31 - 1), SIGNED)
def test_the_larger_magnitude_leaves_out_the_sign(largest: int, bits: int) -> None:
    found = larger(np.int32(largest), np.int32(bits))
    assert found == max(largest, bits & 0x7FFFFFFF)


def test_a_mask_has_a_bit_for_each_word() -> None:
    array = np.random.default_rng(0).integers(-(2**31), 2**31, 100, np.int64).astype(np.int32)
    limit = np.int32(2**30)
    expected = sum(
        1 << place for place in range(64) if int(array[5 + place]) & 0x7FFFFFFF >= limit
    )
    first = next(place for place in range(64) if expected >> place & 1)
    assert mask(array, 5, limit) == (expected, first)
