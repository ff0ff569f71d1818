"""The definition of the codes, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from claw_plan.kernels import reference


@pytest.mark.parametrize("numel", [1, 7, 8, 9, 1000])
def test_signs_are_numpys_packed_bits(numel: int) -> None:
    x = torch.randn(numel)
    out = torch.full((-(-numel // 8),), 255, dtype=torch.uint8)
    reference.pack_signs(x, out)
    np.testing.assert_array_equal(out, np.packbits(x.numpy() >= 0, bitorder="little"))
    back = torch.empty(numel)
    reference.unpack_signs(out, torch.tensor(0.5), back)
    np.testing.assert_array_equal(back, np.where(x.numpy() >= 0, 0.5, -0.5))


def test_means_are_numpys() -> None:
    x = torch.randn(1001)
    wide = x.numpy().astype(np.float64)
    assert reference.mean_abs(x).item() == np.float32(np.abs(wide).mean())
    assert reference.root_mean_square(x).item() == np.float32(np.sqrt((wide**2).mean()))
    x[0] = torch.inf
    assert reference.mean_abs(x).isnan() and reference.root_mean_square(x).isnan()


def test_largest_and_above_are_numpys() -> None:
    x = torch.randn(500)
    magnitudes = np.abs(x.numpy())
    np.testing.assert_array_equal(
        reference.largest(x, 20)[0], np.sort(np.argsort(-magnitudes)[:20])
    )
    np.testing.assert_array_equal(reference.above(x, 1.5)[0], np.flatnonzero(magnitudes > 1.5))
    x[3] = torch.nan
    assert 3 in reference.above(x, 1e38)[0] and reference.largest(x, 1)[0].tolist() == [3]


def test_fractions_fill_the_unit_interval_evenly() -> None:
    normal = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    fractions = reference.random_fractions(normal.view(-1, 8), seed=1)
    counts, _ = np.histogram(fractions, bins=50, range=(0, 1))
    # Chi-square with 49 degrees of freedom: 100 is beyond the 99.99th percentile.
    assert ((counts - 2000.0) ** 2 / 2000).sum() < 100
    equal = reference.random_fractions(torch.ones(100_000).view(-1, 8), seed=1).view(-1)
    counts, _ = np.histogram(equal, bins=50, range=(0, 1))
    assert ((counts - 2000.0) ** 2 / 2000).sum() < 100
    for apart in (1, 4, 8):  # neighbours, those that share a hash, those of the next row
        assert abs(np.corrcoef(equal[apart:], equal[:-apart])[0, 1]) < 0.02
