"""What a rank computes for PowerSGD's means: kernels before, between and after two all-reduces.

Of each matrix M [n, m] = gradient + what was not sent: P = M Q before the first, an orthonormal
basis of P's columns and Q = Mᵀ P between them, and P Qᵀ and the new error after the second
(`executor.communication.power_sgd`). Products are priced as products of their shape, all else by
the memory that it moves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.problem import STORED_BYTES, Problem
from claw_plan.profiles.codecs import LOW_RANK, Factors, describe_codec, factors_of
from claw_plan.profiles.work import OpWork

Shapes = tuple[tuple[int, ...], ...]

ADDED_BYTES = 12
"""Bytes moved for each element of a matrix when gradient and error are added up."""

LEFT_OUT_BYTES = 24
"""The same after the product: put in the gradient's place (8), taken from the sum (12), looked at
for what is not finite (4)."""

JOINED_BYTES = 24
"""The same for each element that travels: made one vector (8), divided by the ranks (8), and put
back (8)."""

CHECKED_BYTES = 4
"""The same for each element of the bucket: a look whether the mean is finite."""


def is_low_rank(candidate: Candidate) -> bool:
    """Whether matrices travel as thin factors."""
    return candidate.codec.partition(":")[0] == LOW_RANK


def factors_in(candidate: Candidate, shapes: Iterable[tuple[int, ...]]) -> Factors:
    """What the candidate's codec makes of tensors of these shapes."""
    return factors_of(shapes, int(describe_codec(candidate.codec).parameters["rank"]))


def kernels_ns(problem: Problem, factors: Factors, elements: int) -> tuple[int, int, int]:
    """Of a bucket of so many elements; the first two are those before and between."""
    before = problem.memory_op_ns(JOINED_BYTES * (factors.whole + factors.left))
    between = problem.memory_op_ns(JOINED_BYTES * factors.right)
    after = problem.memory_op_ns(CHECKED_BYTES * elements)
    for (rows, columns), count in Counter(factors.matrices).items():
        rank, numel = min(factors.rank, rows, columns), rows * columns
        added_ns = problem.memory_op_ns(ADDED_BYTES * numel)
        rest_ns = problem.memory_op_ns(LEFT_OUT_BYTES * numel)
        before += count * (added_ns + _product_ns(problem, rows, rank, columns))
        between += count * _orthonormal_ns(problem, rows, rank)
        between += count * _product_ns(problem, columns, rank, rows)
        after += count * (rest_ns + _product_ns(problem, rows, columns, rank))
    return before, between, after


def _product_ns(problem: Problem, m: int, n: int, k: int) -> int:
    moved_bytes = STORED_BYTES * (m * k + k * n + m * n)
    work = OpWork(
        kind="gemm", dims=(1, m, n, k), dtype="float32", flops=2 * m * n * k, bytes=moved_bytes,
        phase="backward", target="codec.low_rank.product",
    )  # fmt: skip
    return problem.cost.op(work).ns


def _orthonormal_ns(problem: Problem, rows: int, rank: int) -> int:
    """Householder's QR, column by column, then its Q the same way back.

    Each reads and writes half of the columns on average (LAPACK's geqrf and orgqr).
    """
    return 2 * rank * problem.memory_op_ns(STORED_BYTES * rows * rank)
