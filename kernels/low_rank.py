"""PowerSGD's arithmetic: a matrix of gradients as a product of two thin ones, both averaged.

    P = orth(M Q),   Q = Mᵀ P,   M ≈ P Qᵀ        M [n, m], P [n, r], Q [m, r]

Both products are linear in M, so the sums over ranks of M Q and of Mᵀ P may be all-reduced as they
are: no codes, any collective. One step is one step of subspace iteration; starting from the last
step's Q it follows the best rank-r approximation as training moves on. n·r + m·r elements are sent
for n·m. Vectors, and matrices that this would not make smaller, stay dense.

Exact where the rank of M is at most r; never better than the r largest singular values allow
(Eckart-Young): |M - P Qᵀ|² >= Σ_{i > r} σ_i². Source: Vogels et al., PowerSGD, arXiv 1905.13727,
algorithm 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from claw_plan.profiles.codecs import MatrixShape


def first_factor(shape: MatrixShape, rank: int, seed: int, like: Tensor) -> Tensor:
    """The Q to begin with: the same normal numbers on every rank and device, from the seed."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(shape[1], min(rank, *shape), generator=generator, dtype=torch.float64)
    return start.to(like)


def project(matrix: Tensor, right: Tensor) -> Tensor:
    """M Q, to be averaged over ranks and then orthogonalised."""
    # Of thin factors BLAS is several times as fast when they come first and lie in rows.
    return (right.mT.contiguous() @ matrix.mT).mT


def back_project(matrix: Tensor, left: Tensor) -> Tensor:
    """Mᵀ P, to be averaged over ranks; P is orthonormal."""
    return (left.mT @ matrix).mT


def product(left: Tensor, right: Tensor) -> Tensor:
    """P Qᵀ: what all ranks take for the mean of their matrices."""
    return left @ right.mT


def unit_columns(columns: Tensor) -> Tensor:
    """Each divided by its length, zeros kept: the span is the same.

    From there M Q has columns of lengths σ, in place of σ²: less for the scales of codes to span.
    """
    length: Tensor = torch.linalg.vector_norm(columns, dim=0, keepdim=True)
    scaled: Tensor = columns / length.where(length > 0, 1)
    return scaled


def orthonormal(columns: Tensor) -> Tensor:
    """An orthonormal basis that contains the span of the columns, by Householder reflections.

    Gram-Schmidt, as in the paper's code, divides by nothing where columns depend on each other,
    as those of a gradient of zeros do; this does not. bf16 and fp16 are computed in fp32.
    """
    working = columns if columns.dtype == torch.float64 else columns.float()
    basis: Tensor = torch.linalg.qr(working).Q
    return basis.to(columns.dtype)
