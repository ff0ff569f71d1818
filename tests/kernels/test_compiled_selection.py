"""What the CPU selects against its definition, whatever a sample says of the numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.kernels import compiled, compiled_selection, reference

SPECIAL = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-45, 3.4e38])


@pytest.mark.parametrize("count", [1, 70, 700, 30_000, 100_003])
@pytest.mark.parametrize("kind", ["normal", "heavy tails", "one region", "few values", "equal"])
def test_the_largest_are_the_largest(count: int, kind: str) -> None:
    x = torch.randn(100_003, generator=torch.Generator().manual_seed(count))
    if kind == "heavy tails":
        x = x**9
    elif kind == "one region":  # where no sample looks
        x[50_000:50_700] += 1000
    elif kind == "few values":
        x = x.round()
    elif kind == "equal":
        x[:] = 0.5
    x[77], x[78] = torch.nan, torch.inf
    (ours, values), (theirs, _) = compiled.largest(x, count), reference.largest(x, count)
    assert (ours[1:] > ours[:-1]).all() and ours.numel() == count
    torch.testing.assert_close(values, x[ours], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(
        values.abs().sort().values, x[theirs].abs().sort().values, rtol=0, atol=0, equal_nan=True
    )


@settings(deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=150), st.data())
def test_of_equal_magnitudes_the_first_are_taken(values: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(values)))
    x = np.array(values, np.float32)
    stable = np.sort(np.argsort(-np.abs(x), kind="stable")[:count])
    np.testing.assert_array_equal(compiled_selection.largest(x, count)[0], stable)


@pytest.mark.parametrize("numel", [1, 7, 63, 64, 65, 257, 70_001])
@pytest.mark.parametrize("threshold", [0.0, 1e-44, 0.5, 2.5, 3e38])
def test_what_is_above_a_threshold_is_equal(numel: int, threshold: float) -> None:
    x = torch.randn(numel)
    special = x.clone()
    special[: min(8, numel)] = SPECIAL[: min(8, numel)]
    for one in (x, special, torch.zeros(numel)):
        for ours, theirs in zip(
            compiled.above(one, threshold), reference.above(one, threshold), strict=True
        ):
            torch.testing.assert_close(ours.to(theirs.dtype), theirs, equal_nan=True)
