"""PowerSGD's arithmetic against NumPy, Eckart-Young and the mean over ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from claw_plan.kernels.low_rank import (
    back_project,
    first_factor,
    orthonormal,
    product,
    project,
    unit_columns,
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def approximation(matrix: Tensor, rank: int, steps: int) -> Tensor:
    """After so many steps, each starting from the last."""
    right = first_factor((matrix.shape[0], matrix.shape[1]), rank, 0, matrix)
    for _ in range(steps):
        left = orthonormal(project(matrix, right))
        right = back_project(matrix, left)
    return product(left, right)


@pytest.mark.parametrize("rank", [3, 5])
def test_a_matrix_of_that_rank_is_exact(rank: int) -> None:
    matrix = normal(40, 3) @ normal(3, 30, seed=1)
    rest = matrix - approximation(matrix, rank, steps=1)
    assert rest.norm() <= 1e-12 * matrix.norm()


def test_no_better_than_the_singular_values_allow_and_soon_nearly_as_good() -> None:
    # Singular values that fall like those of gradients.
    u, v = orthonormal(normal(60, 40)), orthonormal(normal(50, 40, seed=1))
    values = 0.7 ** torch.arange(40, dtype=torch.float64)
    matrix = u @ torch.diag(values) @ v.mT
    best = np.linalg.norm(np.linalg.svd(matrix.numpy(), compute_uv=False)[4:])
    for steps in (1, 2, 3):
        error = float((matrix - approximation(matrix, 4, steps)).norm())
        assert error >= best * (1 - 1e-12)
    assert error <= 1.1 * best


def test_numpy_comes_to_the_same() -> None:
    matrix = normal(20, 12)
    right = first_factor((20, 12), 2, 0, matrix).numpy()
    left, _ = np.linalg.qr(matrix.numpy() @ right)
    expected = left @ (matrix.numpy().T @ left).T
    np.testing.assert_allclose(approximation(matrix, 2, 1).numpy(), expected, atol=1e-12)


def test_means_of_factors_are_factors_of_the_mean() -> None:
    matrices = [normal(16, 10, seed=seed) for seed in range(4)]
    mean = torch.stack(matrices).mean(0)
    right = first_factor((16, 10), 3, 7, mean)
    left = orthonormal(torch.stack([project(m, right) for m in matrices]).mean(0))
    torch.testing.assert_close(left.mT @ left, torch.eye(3, dtype=torch.float64))
    over_ranks = torch.stack([back_project(m, left) for m in matrices]).mean(0)
    torch.testing.assert_close(product(left, over_ranks), left @ left.mT @ mean)


def test_a_gradient_of_zeros_gives_zeros() -> None:
    zeros = torch.zeros(6, 4)
    back = approximation(zeros, 2, steps=2)
    assert back.isfinite().all() and not back.any()


def test_columns_of_unit_length_and_zeros() -> None:
    columns = torch.tensor([[3.0, 0.0, 1e-15], [4.0, 0.0, 0.0]])
    expected = torch.tensor([[0.6, 0.0, 1.0], [0.8, 0.0, 0.0]])
    torch.testing.assert_close(unit_columns(columns), expected)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_becomes_no_number(bad: float) -> None:
    matrix = torch.ones(9, 7)
    matrix[3, 2] = bad
    assert not approximation(matrix, 2, steps=1).isfinite().any()


def test_narrow_numbers_keep_their_type() -> None:
    basis = orthonormal(torch.randn(30, 4).bfloat16())
    assert basis.dtype == torch.bfloat16
    gram = basis.float().mT @ basis.float()
    torch.testing.assert_close(gram, torch.eye(4), atol=0.02, rtol=0)


def test_every_rank_begins_with_the_same() -> None:
    like = torch.empty(0)
    assert torch.equal(first_factor((9, 7), 2, 3, like), first_factor((9, 7), 2, 3, like))
    assert not torch.equal(first_factor((9, 7), 2, 3, like), first_factor((9, 7), 2, 4, like))
