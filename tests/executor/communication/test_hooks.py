"""Gradients under DistributedDataParallel with our means in its buckets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

Found = list[dict[str, Any]]


def test_whole_gradients_are_those_of_no_hook_to_the_last_bit(hooked: Found) -> None:
    for rank in hooked:
        found = rank["hooked_gradients"]
        for whole, plain in zip(found["whole"], found["plain"], strict=True):
            assert torch.equal(whole, plain)


def test_another_algorithm_differs_by_the_order_of_sums(hooked: Found) -> None:
    found = hooked[0]["hooked_gradients"]
    for ring, plain in zip(found["ring"], found["plain"], strict=True):
        torch.testing.assert_close(ring, plain, rtol=1e-5, atol=1e-6)


def test_a_codec_begins_once_the_buckets_are_final(hooked: Found) -> None:
    for rank in hooked:
        found, first = rank["hooked_gradients"], hooked[0]["hooked_gradients"]
        assert torch.equal(found["one_bit"][0], found["plain"][0])
        for step in (1, 2):
            assert torch.equal(found["one_bit"][step], first["one_bit"][step])
            assert not torch.allclose(found["one_bit"][step], found["plain"][step], rtol=0.1)
