"""What is compiled for the CPU against its definition: equal codes, sums to an ulp."""

from __future__ import annotations

import pytest
import torch

from claw_plan.kernels import compiled, reference

SIZES = (1, 7, 8, 9, 255, 256, 257, 70_001)
SPECIAL = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-45, 3.4e38])


@pytest.mark.parametrize("numel", SIZES)
def test_signs_are_packed_equally(numel: int) -> None:
    x = torch.randn(numel)
    x[: min(8, numel)] = SPECIAL[: min(8, numel)]
    ours, theirs = (torch.empty(-(-numel // 8), dtype=torch.uint8) for _ in range(2))
    compiled.pack_signs(x, ours)
    reference.pack_signs(x, theirs)
    assert torch.equal(ours, theirs)
    first, second = torch.empty(numel), torch.empty(numel)
    compiled.unpack_signs(ours, torch.tensor(0.3), first)
    reference.unpack_signs(ours, torch.tensor(0.3), second)
    assert torch.equal(first, second)


@pytest.mark.parametrize("numel", SIZES)
def test_sums_agree_to_one_ulp(numel: int) -> None:
    x = torch.randn(numel) * 10.0 ** torch.randint(-20, 20, (numel,))
    for name in ("mean_abs", "root_mean_square"):
        ours, theirs = getattr(compiled, name)(x), getattr(reference, name)(x)
        assert abs(ours - theirs) <= torch.finfo(torch.float32).eps * theirs


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_sums_of_what_is_not_finite_are_nan(bad: float) -> None:
    x = torch.ones(100)
    x[50] = bad
    assert compiled.mean_abs(x).isnan() and compiled.root_mean_square(x).isnan()
