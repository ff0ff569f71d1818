"""PowerSGD's kernels counted by hand: 10 bytes a nanosecond, products by their flops."""

from __future__ import annotations

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.low_rank import factors_in, is_low_rank, kernels_ns
from claw_plan.profiles.codecs import factors_of


def test_which_candidates_send_factors():
    assert is_low_rank(Candidate(codec="low_rank:2")) and is_low_rank(Candidate(codec="low_rank"))
    assert not is_low_rank(Candidate(codec="int8")) and not is_low_rank(Candidate())
    factors = factors_in(Candidate(codec="low_rank:2"), [(6, 10), (7,)])
    assert (factors.rank, factors.left, factors.right, factors.whole) == (2, 12, 20, 7)
    assert factors_in(Candidate(codec="low_rank"), []).rank == 16


def test_a_vector_is_only_copied(toys):
    problem = toys.problem()
    assert kernels_ns(problem, factors_of([(100,)], 2), 100) == (24 * 100 // 10, 0, 40)


def product_ns(m, n, k):
    return 1000 * 2 * m * n * k + 4 * (m * k + k * n + m * n) // 10


def test_each_matrix_has_three_products_and_a_basis(toys):
    """One, then two of 60 x 40 at rank 2; the toy takes 1000 ns a flop and 1 for 10 bytes."""
    problem = toys.problem()
    one, two = (
        kernels_ns(problem, factors_of([(60, 40)] * count, 2), 2400 * count) for count in (1, 2)
    )
    before, between, after = one
    assert before == 24 * 120 // 10 + 12 * 2400 // 10 + product_ns(60, 2, 40)
    assert between == 24 * 80 // 10 + 4 * (4 * 60 * 2 // 10) + product_ns(40, 2, 60)
    assert after == (4 + 24) * 2400 // 10 + product_ns(60, 40, 2)
    assert two == (2 * before, 2 * between, 2 * after)
