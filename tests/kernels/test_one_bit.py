"""One bit per element: layout, error by algebra, and the scale that does not contract."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from claw_plan.kernels.one_bit import OneBit

VALUES = st.lists(
    # Without those whose mean fp32 cannot hold to its usual precision.
    st.floats(-(2.0**50), 2.0**50, width=32).map(
        lambda value: value if abs(value) > 1e-30 else 0.0
    ),
    min_size=1,
    max_size=200,
)
L1, L2 = OneBit(scale="l1"), OneBit(scale="l2")


def relative_error(codec: OneBit, x: Tensor) -> float:
    rest = x.double() - codec.decode(codec.encode(x), x.numel()).double()
    return float(rest.square().sum() / x.double().square().sum())


def test_layout_by_hand() -> None:
    x = torch.tensor([1.0, -2.0, 0.0, -0.0, 3.0, -4.0, 5.0, -6.0, -7.0, 2.0])
    # Signs + - + + + - + - | - +, the first in the lowest bit; the mean magnitude is 3.
    assert L1.encode(x).tolist() == [0, 0, 0x40, 0x40, 0b01011101, 0b10, 0, 0]
    assert L1.decode(L1.encode(x), 10).tolist() == [3, -3, 3, 3, 3, -3, 3, -3, -3, 3]


def test_numpy_makes_the_same_codes() -> None:
    x = torch.randn(100_003)
    scale = np.float32(np.abs(x.numpy().astype(np.float64)).mean()).tobytes()
    bits = np.packbits(x.numpy() >= 0, bitorder="little").tobytes()
    assert L1.encode(x).numpy().tobytes()[: 4 + len(bits)] == scale + bits


def test_one_bit_an_element_and_one_scale_a_buffer() -> None:
    numel = 1 << 20
    assert L1.wire_bytes(numel) == numel // 8 + 4
    assert 4 * numel / L1.wire_bytes(numel) > 31.99


@settings(deadline=None)
@given(VALUES)
def test_the_error_is_that_of_the_algebra(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32).double()
    rest = x - L1.decode(L1.encode(x), x.numel()).double()
    whole = float(x.square().sum())
    expected = whole - float(x.abs().sum()) ** 2 / x.numel()
    assert float(rest.square().sum()) == pytest.approx(expected, rel=1e-6, abs=1e-6 * whole)


@settings(deadline=None)
@given(VALUES)
def test_the_l1_scale_always_contracts(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    rest = x.double() - L1.decode(L1.encode(x), x.numel()).double()
    whole = float(x.double().square().sum())
    assert float(rest.square().sum()) <= (1 - 1 / x.numel()) * whole + 1e-6 * whole


def test_the_l2_scale_does_not_contract_on_few_large_elements() -> None:
    spiky = torch.zeros(10_000)
    spiky[::100] = torch.randn(100, generator=torch.Generator().manual_seed(0))
    n, l1, l2 = 10_000, float(spiky.abs().sum()), float(spiky.norm())
    assert l1 < n**0.5 * l2 / 2
    assert relative_error(L2, spiky) == pytest.approx(2 - 2 * l1 / (n**0.5 * l2), rel=1e-5)
    assert relative_error(L2, spiky) > 1.8 > 1 > relative_error(L1, spiky)


def test_errors_on_normal_numbers_are_those_of_their_moments() -> None:
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1))
    # E|x| = sqrt(2/π) of a standard normal.
    assert relative_error(L1, x) == pytest.approx(1 - 2 / np.pi, abs=0.002)
    assert relative_error(L2, x) == pytest.approx(2 - 2 * (2 / np.pi) ** 0.5, abs=0.002)


def test_huge_values_do_not_overflow_on_the_way_to_their_mean() -> None:
    x = torch.full((5000,), 3e38)
    assert torch.equal(L1.decode(L1.encode(x), 5000), x)
    assert L2.decode(L2.encode(x), 5000).isfinite().all()


def test_one_bad_value_makes_all_nan() -> None:
    x = torch.ones(20)
    x[3] = torch.inf
    assert L1.decode(L1.encode(x), 20).isnan().all()
