"""Number formats alone: exactness, and what fp16's scale changes."""

from __future__ import annotations

import pytest
import torch

from claw_plan.kernels.plain import Half, Uncompressed


def test_none_is_exact() -> None:
    x = torch.randn(1001)
    assert torch.equal(Uncompressed().decode(Uncompressed().encode(x), 1001), x)
    narrow = x.bfloat16()
    assert torch.equal(
        Uncompressed().decode(Uncompressed().encode(narrow), 1001, torch.bfloat16), narrow
    )


def test_fp64_is_exact_where_asked_for() -> None:
    wide = torch.randn(1001, dtype=torch.float64)
    codec = Uncompressed(format="fp64")
    assert torch.equal(codec.decode(codec.encode(wide), 1001, torch.float64), wide)
    assert not torch.equal(
        Uncompressed().decode(Uncompressed().encode(wide), 1001, torch.float64), wide
    )


@pytest.mark.parametrize("exponent", [-20, -1, 1, 12])
def test_scaling_by_a_power_of_two_changes_nothing_between_under_and_overflow(
    exponent: int,
) -> None:
    x = torch.randn(10_000) * 2.0 ** torch.randint(-40, 40, (10_000,))
    plain = Half().decode(Half().encode(x), 10_000)
    scaled = Half(exponent=exponent).decode(Half(exponent=exponent).encode(x), 10_000)

    def normal(y: torch.Tensor) -> torch.Tensor:
        return (y.abs() >= 2.0**-14) & (y.abs() < 65504)

    both = normal(x) & normal(x * 2.0**exponent)
    assert 1000 < both.sum() < 9000
    assert torch.equal(plain[both], scaled[both])
    # Half an ulp: fp16 keeps eleven bits.
    assert ((scaled - x)[both].abs() <= 2.0**-11 * x[both].abs()).all()


def test_overflow_is_infinite_where_half_an_ulp_above_the_largest_says() -> None:
    edge = torch.tensor([65519.99, 65520.0]) / 4096
    codec = Half(exponent=12)
    # 65504 / 4096 = 15.99: what one rank may send at 2^12.
    assert codec.decode(codec.encode(edge), 2).tolist() == [65504 / 4096, torch.inf]
