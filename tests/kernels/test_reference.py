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
