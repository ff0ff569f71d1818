from itertools import product

import pytest

from claw_plan.planner.split.states import (
    PARTIAL,
    SHARED,
    WHOLE,
    Change,
    change_of,
    cut,
    fits,
)

CONJUGATE = {"": "", "all_reduce": "", "all_gather": "reduce_scatter"}


def test_entering_and_leaving_a_region_are_megatrons_f_and_g() -> None:
    # Shoeybi et al. 2019, fig. 3: f copies and sums the gradient, g sums and copies it.
    assert change_of(WHOLE, SHARED) == Change("", "all_reduce")
    assert change_of(PARTIAL, WHOLE) == Change("all_reduce", "")


def test_along_the_sequence_they_are_gather_and_scatter() -> None:
    # Korthikanti et al., arXiv 2205.05198, fig. 5.
    assert change_of(cut(1), SHARED) == Change("all_gather", "reduce_scatter")
    assert change_of(PARTIAL, cut(1)) == Change("reduce_scatter", "all_gather")


@pytest.mark.parametrize(
    ("origin", "target"), list(product((WHOLE, SHARED, PARTIAL, cut(0)), repeat=2))
)
def test_there_and_back_costs_the_same_in_both_passes(origin, target) -> None:  # type: ignore[no-untyped-def]
    """The gradient of a change is the change back of the conjugate state."""
    gradient = {"whole": WHOLE, "shared": PARTIAL, "partial": SHARED, "cut": cut(0)}
    change = change_of(origin, target)
    back = change_of(gradient[target.kind], gradient[origin.kind])
    if change is not None and back is not None and "shared" not in (origin.kind, target.kind):
        assert (change.forward, change.backward) == (back.backward, back.forward)


def test_what_has_no_gradient_moves_forward_only() -> None:
    assert change_of(WHOLE, cut(0), needs_grad=False) == Change()
    assert change_of(cut(0), WHOLE, needs_grad=False) == Change("all_gather", "")


def test_a_sum_is_never_made_of_what_is_whole() -> None:
    assert change_of(WHOLE, PARTIAL) is None
    assert change_of(SHARED, WHOLE) is None


@pytest.mark.parametrize(
    ("state", "degree", "fitting"),
    [(cut(1), 4, True), (cut(1), 8, False), (cut(1, 3), 4, True), (cut(2), 2, False)],
)
def test_pieces_and_degree_divide_the_dimension(state, degree, fitting) -> None:  # type: ignore[no-untyped-def]
    assert fits((5, 12), state, degree) is fitting
    assert fits((5, 12), WHOLE, degree)
