"""The agreed power of two: GradScaler step by step, the ceiling, and no overflow in use."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.kernels.fp16_scale import Fp16Scale, highest_exponent


@settings(max_examples=30, deadline=None)
@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5))
def test_it_moves_like_torchs_grad_scaler(overflows: list[bool], interval: int) -> None:
    scale = torch.tensor(2.0**12)
    growth = torch.tensor(0, dtype=torch.int32)
    ours = Fp16Scale(exponent=12, growth_interval=interval)
    for overflow in overflows:
        torch._amp_update_scale_(scale, growth, torch.tensor(float(overflow)), 2.0, 0.5, interval)
        ours.update(overflow=overflow)
        assert 2.0**ours.exponent == scale.item()
        assert ours.clean_steps == growth.item()


@pytest.mark.parametrize(
    ("amax", "ranks", "expected"),
    [(15.99, 1, 12), (16.0, 1, 11), (1.9990, 8, 12), (2.0, 8, 11), (0.0, 8, 126), (1e-45, 1, 126)],
)
def test_the_ceiling_by_hand(amax: float, ranks: int, expected: int) -> None:
    # 65504 / 2^12 = 15.99 on one rank, 2.0 an element for the sum of eight.
    assert highest_exponent(amax, ranks, margin=1.0) == expected


@given(st.floats(2.0**-80, 2.0**80), st.integers(1, 1024))
def test_the_ceiling_is_the_last_that_does_not_overflow(amax: float, ranks: int) -> None:
    highest = highest_exponent(amax, ranks, margin=1.0)
    assert ranks * amax * 2.0**highest <= 65504 * (1 + 1e-12)
    assert ranks * amax * 2.0 ** (highest + 1) > 65504 * (1 - 1e-12)


def test_nothing_overflows_where_magnitudes_are_agreed_on() -> None:
    generator = torch.Generator().manual_seed(0)
    scale = Fp16Scale(exponent=20, growth_interval=3)
    scale.update(overflow=False, amax=4.0)
    overflows = 0
    for step in range(500):
        # Slow growth by 2^10 and back.
        size = 2.0 ** (10 - abs(step - 250) / 25)
        x = torch.randn(256, generator=generator).clamp(-4, 4) * size
        codec = scale.codec
        finite = bool(codec.decode(codec.encode(x), 256).isfinite().all())
        overflows += not finite
        scale.update(overflow=not finite, amax=float(x.abs().max()))
    assert overflows == 0
    assert scale.exponent > 0


def test_overflow_backs_off_until_it_fits() -> None:
    scale = Fp16Scale(exponent=30)
    x = torch.tensor([10.0])
    while not scale.codec.decode(scale.codec.encode(x), 1).isfinite().all():
        scale.update(overflow=True)
    # 10 · 2^12 = 40960 fits and 10 · 2^13 = 81920 does not.
    assert scale.exponent == 12


def test_what_is_not_finite_is_no_magnitude() -> None:
    scale = Fp16Scale()
    scale.update(overflow=True, amax=float("inf"))
    scale.update(overflow=True, amax=float("nan"))
    assert scale.amax == 0 and scale.exponent == 10


def test_a_saved_state_goes_on() -> None:
    first, second = Fp16Scale(growth_interval=4), Fp16Scale(growth_interval=4)
    for overflow in (False, True, False, False):
        first.update(overflow=overflow, amax=1.0)
    second.load_state_dict(first.state_dict())
    assert second == first
