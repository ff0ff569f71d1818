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


def block_inputs(numel: int) -> list[torch.Tensor]:
    """Normal numbers, numbers of all sizes, everything special, and ties."""
    generator = torch.Generator().manual_seed(numel)
    normal = torch.randn(numel, generator=generator)
    wide = normal * 2.0 ** torch.randint(-140, 120, (numel,), generator=generator)
    special = normal.clone()
    special[: min(8, numel)] = SPECIAL[: min(8, numel)]
    # Halfway between two codes, of fp8 often and of int8 where the scale is one.
    halves = torch.randint(-254, 255, (numel,), generator=generator) / 2
    halves[::32] = 127
    return [normal, wide, special, halves, torch.zeros(numel)]


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("limit", [7, 127])
@pytest.mark.parametrize("seed", [None, 3])
def test_small_numbers_are_equal(numel: int, limit: int, seed: int | None) -> None:
    for x in block_inputs(numel):
        made = []
        for one in (compiled, reference):
            scales = torch.empty(-(-numel // 32))
            codes = torch.empty(numel, dtype=torch.int8)
            one.encode_ints(x, 32, limit, seed, scales, codes)
            back = torch.empty(numel)
            one.decode_ints(codes, scales, 32, back)
            made.append((scales, codes, back))
        for ours, theirs in zip(*made, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("numel", SIZES)
def test_nibbles_are_equal(numel: int) -> None:
    codes = torch.randint(-8, 8, (numel,), dtype=torch.int8)
    ours, theirs = (torch.empty(-(-numel // 2), dtype=torch.uint8) for _ in range(2))
    compiled.pack_nibbles(codes, ours)
    reference.pack_nibbles(codes, theirs)
    assert torch.equal(ours, theirs)
    for one in (compiled, reference):
        back = torch.empty_like(codes)
        one.unpack_nibbles(ours, back)
        assert torch.equal(back, codes)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("form", [reference.E4M3, reference.E5M2], ids=["e4m3", "e5m2"])
def test_fp8_numbers_are_equal(numel: int, form: reference.Fp8Format) -> None:
    for x in block_inputs(numel):
        made = []
        for one in (compiled, reference):
            codes = torch.empty(numel, dtype=torch.uint8)
            exponents = torch.empty(-(-numel // 32), dtype=torch.uint8)
            one.encode_fp8(x, 32, form, codes, exponents)
            back = torch.empty(numel)
            one.decode_fp8(codes, exponents, 32, form, back)
            made.append((codes, exponents, back))
        for ours, theirs in zip(*made, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
