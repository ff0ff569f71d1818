from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from claw_plan.planner.graph import Amount, Exchange, Op, UnitCost
from claw_plan.planner.join import Join

COUNTS = st.integers(0, 10**9)


@given(COUNTS, COUNTS, COUNTS, COUNTS)
def test_a_divided_amount_is_found_from_two_degrees(a: int, b: int, c: int, d: int) -> None:
    truth = Amount(a, b, 12 * c, 12 * d)
    at = [Amount(a + 12 * c // tp, b + 12 * d // tp) for tp in (2, 3)]
    join = Join(2, 3)
    assert join.amount(*at, "x") == truth
    assert not join.inexact


def test_what_is_not_divided_evenly_is_named_and_right_at_the_first_degree() -> None:
    join = Join(2, 5)
    joined = join.amount(Amount(0, 7), Amount(0, 5), "odd")
    assert join.inexact == {"odd"}
    assert joined.at(1, 2) == 7


def op(target: str, flops: int = 0) -> Op:
    return Op(
        kind="memory",
        target=target,
        module="m",
        dims=(Amount(flops),),
        dtype="float32",
        flops=Amount(flops),
        read_bytes=Amount(),
        written_bytes=Amount(),
    )


def cost(*forward: Op | Exchange, saved: int = 0) -> UnitCost:
    none = Amount()
    return UnitCost(
        forward=forward,
        backward=(),
        saved_bytes=Amount(saved),
        input_bytes=none,
        output_bytes=none,
        forward_peak_bytes=none,
        backward_peak_bytes=none,
    )


def test_units_are_joined_operator_by_operator() -> None:
    exchange = Exchange(op="all_reduce", bytes=Amount(64), module="m")
    join = Join(2, 4)
    joined = join.unit(
        cost(op("mm", 50), exchange, saved=30), cost(op("mm", 25), exchange, saved=20)
    )
    product, collective = joined.forward
    assert isinstance(product, Op) and product.flops == Amount(0, 0, 100, 0) == product.dims[0]
    assert collective == exchange
    assert joined.saved_bytes == Amount(10, 0, 40, 0)


def test_an_operator_that_falls_away_at_a_degree_is_kept_and_named() -> None:
    join = Join(2, 4)
    joined = join.unit(
        cost(op("mm", 8), op("clone", 3), op("add", 8)), cost(op("mm", 4), op("add", 8))
    )
    assert [(o.target, o.flops.at(1, 2)) for o in joined.forward if isinstance(o, Op)] == [
        ("mm", 8),
        ("clone", 3),
        ("add", 8),
    ]
    assert join.inexact == {"clone in m"}
