"""Few elements sent exactly: which, in which layout, and what is left."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.kernels.sparse import Threshold, TopK
from claw_plan.profiles.codecs import CodecError

VECTORS = st.lists(st.floats(-(2.0**50), 2.0**50, width=32), min_size=1, max_size=200)


def test_layout_by_hand() -> None:
    codes = TopK(density=0.5).encode(torch.tensor([1.0, -4.0, 2.0, 0.5]))
    assert codes[:8].view(torch.int32).tolist() == [1, 2]
    assert codes[8:].view(torch.float32).tolist() == [-4.0, 2.0]
    assert TopK(density=0.5).decode(codes, 4).tolist() == [0.0, -4.0, 2.0, 0.0]


@pytest.mark.parametrize("density", [0.001, 0.07, 1.0])
def test_numpy_selects_the_same(density: float) -> None:
    x = torch.randn(5000).numpy()
    kept = {0.001: 5, 0.07: 350, 1.0: 5000}[density]
    expected = np.zeros_like(x)
    largest = np.argsort(-np.abs(x), kind="stable")[:kept]
    expected[largest] = x[largest]
    codec = TopK(density=density)
    np.testing.assert_array_equal(codec.decode(codec.encode(torch.tensor(x)), 5000), expected)


def test_a_thousandth_is_270_times_smaller() -> None:
    numel = 10_000_000
    assert 4 * numel / TopK(density=0.001).wire_bytes(numel) == 500


@settings(deadline=None)
@given(VECTORS, st.sampled_from([0.01, 0.1, 0.5, 1.0]))
def test_what_is_left_is_at_most_the_share_not_sent(values: list[float], density: float) -> None:
    codec = TopK(density=density)
    x = torch.tensor(values, dtype=torch.float32)
    codes = codec.encode(x)
    kept = codes.numel() // 8
    rest = (x - codec.decode(codes, x.numel())).double().square().sum()
    assert rest <= (1 - kept / x.numel()) * x.double().square().sum() * (1 + 1e-12)


@settings(deadline=None)
@given(VECTORS, st.sampled_from([0.0, 1e-3, 1.0, 1e9]))
def test_a_threshold_sends_what_is_above_it(values: list[float], threshold: float) -> None:
    codec = Threshold(threshold=threshold)
    x = torch.tensor(values, dtype=torch.float32)
    decoded = codec.decode(codec.encode(x), x.numel())
    limit = torch.tensor(threshold)
    assert torch.equal(decoded, torch.where(x.abs() > limit, x, torch.zeros(())))


def test_threshold_zero_is_dense() -> None:
    x = torch.randn(1000)
    assert torch.equal(Threshold(threshold=0).decode(Threshold(threshold=0).encode(x), 1000), x)


@settings(deadline=None)
@given(VECTORS)
def test_sent_and_residual_are_exactly_the_input(values: list[float]) -> None:
    for codec in (TopK(density=0.2), Threshold(threshold=1.0)):
        x = torch.tensor(values, dtype=torch.float32)
        codes = codec.encode(x)
        rest = codec.subtract_sent(x.clone(), codes)
        assert torch.equal(rest + codec.decode(codes, x.numel()), x)


def test_codes_of_a_threshold_are_pairs() -> None:
    with pytest.raises(CodecError, match="pairs of 8 bytes, got 12 bytes"):
        Threshold(threshold=1.0).decode(torch.zeros(12, dtype=torch.uint8), 100)
