from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.planner.fit import LARGEST_BATCH, Fit, ProgramChanges, identity
from claw_plan.planner.graph import Amount, Exchange, Op
from claw_plan.planner.op_work import Work
from claw_plan.planner.recorder import (
    BACKWARD,
    FORWARD,
    RecordedExchange,
    RecordedOp,
    Recording,
    _Birth,
)

SIZES = (2, 3, 5)


def product(batch: int, unit: int = 0, target: str = "aten.mm") -> RecordedOp:
    work = Work("gemm", (1, 4 * batch, 8, 16), "float32", 1024 * batch, 512 + 256 * batch, 7)
    return RecordedOp(unit, FORWARD, "m", target, work)


@given(st.integers(-1000, 10**15), st.integers(0, 10**12))
def test_lines_are_found_exactly(fixed: int, slope: int) -> None:
    fit = Fit(SIZES)
    assert fit.amount([fixed + slope * b for b in SIZES], "x") == Amount(fixed, slope)
    assert not fit.curved


def test_what_is_no_line_is_named() -> None:
    fit = Fit(SIZES)
    fit.amount([b * b for b in SIZES], "pairs")
    assert fit.curved == {"pairs"}


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_pairs_of_samples_cost_nothing_below_zero(quadratic: int, linear: int) -> None:
    fit = Fit(SIZES)
    found = fit.amount([quadratic * b * b + linear * b for b in SIZES], "pairs")
    assert all(found.at(batch) >= 0 for batch in range(1, 300))
    assert found.at(5) == 25 * quadratic + 5 * linear
    assert fit.amount([9, 4, 1], "ever less").at(300) == 9
    assert Fit((2, 3)).amount([4 * quadratic, 9 * quadratic], "pairs").at(1) >= 0


def test_one_batch_size_gives_a_proportion() -> None:
    assert Fit([5]).amount([35], "x") == Amount(0, 7)


def test_operators_keep_their_order_and_dims() -> None:
    recordings = [
        Recording(ops=[product(b), RecordedExchange(0, FORWARD, "m", "all_reduce", 10 * b)])
        for b in SIZES
    ]
    (cost,) = Fit(SIZES).units(recordings, 1)
    assert cost.forward == (
        Op(
            kind="gemm",
            target="aten.mm",
            module="m",
            dims=(Amount(1), Amount(0, 4), Amount(8), Amount(16)),
            dtype="float32",
            flops=Amount(0, 1024),
            read_bytes=Amount(512, 256),
            written_bytes=Amount(7),
        ),
        Exchange(op="all_reduce", bytes=Amount(0, 10), module="m"),
    )
    assert cost.backward == ()


def test_another_program_is_refused_with_its_place() -> None:
    ops = [[product(2)], [product(3), product(3, target="aten.add")], [product(5)]]
    with pytest.raises(ProgramChanges, match="m"):
        Fit(SIZES).units([Recording(ops=each) for each in ops], 1)
    with pytest.raises(ProgramChanges, match=r"aten\.add|gemm"):
        Fit((2, 3)).units(
            [Recording(ops=[product(2)]), Recording(ops=[product(3, target="aten.add")])], 1
        )


def test_identity_leaves_out_what_depends_on_the_batch() -> None:
    assert identity(product(2)) == identity(product(3))
    assert identity(product(2)) != identity(product(2, target="aten.bmm"))


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 50)), min_size=1, max_size=5))
def test_a_peak_is_never_below_any_of_its_lines(lines: list[tuple[int, int]]) -> None:
    def recording(batch: int) -> Recording:
        lives = []
        for number, (fixed, slope) in enumerate(lines):
            size = fixed + slope * batch
            lives.append(_Birth(0, BACKWARD, number, size))
            lives.append(_Birth(0, BACKWARD, number, -size))
        return Recording(lives=lives)

    (cost,) = Fit(SIZES).units([recording(b) for b in SIZES], 1)
    peak = cost.backward_peak_bytes
    for batch in range(1, LARGEST_BATCH + 1):
        assert peak.at(batch) >= max(fixed + slope * batch for fixed, slope in lines)
    highest = max(fixed + slope for fixed, slope in lines)
    assert peak.at(1) == highest


def test_hidden_states_pass_from_unit_to_unit() -> None:
    recordings = [Recording(boundary_bytes={0: 8 * b, 1: 16 * b}) for b in SIZES]
    costs = Fit(SIZES).units(recordings, 3)
    assert [(c.input_bytes, c.output_bytes) for c in costs] == [
        (Amount(), Amount(0, 8)),
        (Amount(0, 8), Amount(0, 16)),
        (Amount(0, 16), Amount()),
    ]


def test_an_exchange_keeps_its_axis() -> None:
    ops = [[RecordedExchange(0, FORWARD, "m", "all_to_all", 10 * b, "ep")] for b in SIZES]
    (cost,) = Fit(SIZES).units([Recording(ops=list(each)) for each in ops], 1)
    assert cost.forward == (Exchange(op="all_to_all", bytes=Amount(0, 10), module="m", axis="ep"),)
    other = RecordedExchange(0, FORWARD, "m", "all_to_all", 20, "cp")
    assert identity(ops[0][0]) != identity(other)


def test_two_sizes_show_no_curve_but_nothing_shrinks_below_zero() -> None:
    fit = Fit((2, 4))
    assert fit.amount([10, 18], "line") == Amount(2, 4)
    assert fit.amount([7, 7], "constant") == Amount(7)
    assert not fit.curved
