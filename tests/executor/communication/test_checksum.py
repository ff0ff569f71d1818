"""Checksums: every flipped bit changes them."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.executor.communication.checksum import (
    BLOCK_WORDS,
    checksum,
    outvoted,
)

LARGEST = 2**64


@given(st.binary(min_size=1, max_size=200), st.data())
@settings(deadline=None)
def test_one_flipped_bit_changes_both_sums(content: bytes, data: st.DataObject) -> None:
    codes = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    before = checksum(codes).tolist()
    place = data.draw(st.integers(0, 8 * len(content) - 1))
    codes[place // 8] ^= 1 << place % 8
    after = checksum(codes).tolist()
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_the_sums_by_hand() -> None:
    words = torch.arange(2 * BLOCK_WORDS + 3, dtype=torch.int64)
    blocks = [
        sum(range(BLOCK_WORDS)),
        sum(range(BLOCK_WORDS, 2 * BLOCK_WORDS)),
        sum(range(2 * BLOCK_WORDS, 2 * BLOCK_WORDS + 3)),
    ]
    weighted = blocks[0] + 3 * blocks[1] + 5 * blocks[2]
    assert checksum(words).tolist() == [sum(blocks), weighted]


def test_equal_changes_in_two_blocks_are_seen_by_the_weights() -> None:
    words = torch.zeros(2 * BLOCK_WORDS, dtype=torch.int64)
    before = checksum(words).tolist()
    words[5] += 8
    words[BLOCK_WORDS + 5] -= 8
    after = checksum(words).tolist()
    assert before[0] == after[0]
    assert before[1] != after[1]


@given(st.integers(1, 40), st.integers(0, 9))
@settings(deadline=None)
def test_any_dtype_and_offset(length: int, offset: int) -> None:
    numbers = torch.randn(length + offset).to(torch.bfloat16)
    assert torch.equal(checksum(numbers[offset:]), checksum(numbers[offset:].clone()))


@given(st.lists(st.lists(st.integers(-(2**62), 2**62), min_size=3, max_size=3), min_size=2))
@settings(deadline=None)
def test_the_checksum_of_a_sum_is_the_sum_of_checksums(rows: list[list[int]]) -> None:
    tensors = [torch.tensor(row) for row in rows]
    summed = torch.stack(tensors).sum(0)
    told = sum(int(checksum(tensor)[0]) for tensor in tensors)
    assert (int(checksum(summed)[0]) - told) % LARGEST == 0


def test_the_majority_is_right() -> None:
    a, b, c = (1, 2), (3, 4), (5, 6)
    assert outvoted([a, a, a]) == []
    assert outvoted([a, b, a]) == [1]
    assert outvoted([a, b]) == [0, 1]
    assert outvoted([a, b, c]) == [0, 1, 2]
    assert outvoted([a, a, b, b]) == [0, 1, 2, 3]
